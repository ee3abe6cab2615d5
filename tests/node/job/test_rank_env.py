"""The variables that a rank has beside torchrun's, or in their place."""

from typing import Any

import pytest

from orchestrator.node.job.ranks import rank

TORCHRUN = {
    **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"},
    **{"GROUP_RANK": "2", "ROLE_RANK": "5", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "NODE_RANK": "2"},
    "HOME": "/home/u",
}
SPEC: dict[str, Any] = {
    **{"job": "e-abc", "experiment": "e", "node": 2, "nnodes": 3},
    "hosts": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
}


def seen(*kinds: str, **changes: Any) -> dict[str, str]:
    environ = dict(TORCHRUN)
    rank.complete_environment(environ, {**SPEC, "rank_env": list(kinds), **changes})  # type: ignore[typeddict-item]
    return environ


def test_environment_is_unchanged_by_default() -> None:
    assert seen() == TORCHRUN


def test_slurm_variables_are_set() -> None:
    env = seen("slurm")
    expected = {
        **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "6", "SLURM_NODEID": "2"},
        **{"SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "2"},
        "SLURM_JOB_NODELIST": "10.0.0.1,10.0.0.2,10.0.0.3",
    }
    assert expected.items() <= env.items() and TORCHRUN.items() <= env.items()
    assert env["SLURM_JOB_ID"].isdigit()
    assert seen("slurm", job="e-xyz")["SLURM_JOB_ID"] != env["SLURM_JOB_ID"]


def test_slurm_variables_of_user_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank's place among the others is always that of this job."""
    monkeypatch.setitem(TORCHRUN, "SLURM_JOB_ID", "4711")
    monkeypatch.setitem(TORCHRUN, "SLURM_CPUS_PER_TASK", "3")
    monkeypatch.setitem(TORCHRUN, "SLURM_PROCID", "0")
    env = seen("slurm")
    assert (env["SLURM_JOB_ID"], env["SLURM_CPUS_PER_TASK"]) == ("4711", "3")
    assert env["SLURM_PROCID"] == "5" and env["SLURM_JOB_NAME"] == "e"


def test_own_launcher_sees_no_torchrun_variables() -> None:
    kept = {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert seen("own") == {**kept, "NODE_RANK": "2", "HOME": "/home/u"}
