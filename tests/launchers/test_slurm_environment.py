"""Slurm's environment variables are read in Slurm's own spellings."""

import pytest

from orchestrator.common import slurm_environment
from orchestrator.common.errors import CheckFailed


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11,1]", ["n08", "n09", "n10", "n11", "n1"]),
        ("gpu-a1,n[1-2],x", ["gpu-a1", "n1", "n2", "x"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("node[6-7].cluster", ["node6.cluster", "node7.cluster"]),
        ("n[009-010]", ["n009", "n010"]),
        (" n1,n1 ", ["n1", "n1"]),
    ],
)
def test_hosts_expands_as_slurm(text: str, names: list[str]) -> None:
    assert slurm_environment.expand_hosts("HOSTS", text) == names


@pytest.mark.parametrize(
    "text",
    ["", "n[1-2", "n1]", "n[]", "n[a-b]", "n[3-1]", "n[1-99999999]", ",n1", "n1,,n2", "n[[1]]"],
)
def test_invalid_hostlist_is_refused(text: str) -> None:
    with pytest.raises(CheckFailed, match="HOSTS cannot be read: "):
        slurm_environment.expand_hosts("HOSTS", text)


BATCH = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}


def test_allocation_is_read_from_environment() -> None:
    assert slurm_environment.read_allocation({}) is None
    assert slurm_environment.read_allocation(BATCH) == slurm_environment.Allocation(
        "12", ("n1", "n2"), None
    )
    old = {"SLURM_JOBID": "7", "SLURM_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "4"}
    assert slurm_environment.read_allocation(old) == slurm_environment.Allocation("7", ("n1",), 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_ID is set and SLURM_JOB_NODELIST is not"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_NODELIST is set and SLURM_JOB_ID is not"),
        ({"SLURM_JOB_ID": "12_1"}, "'12_1', which is not the number"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST cannot be read"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "has 2 nodes and SLURM_JOB_NUM_NODES is 3"),
    ],
)
def test_partial_allocation_is_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(CheckFailed, match="half a Slurm environment") as refused:
        slurm_environment.read_allocation({**BATCH, **change})
    assert words in str(refused.value)


TASK = {
    **{"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
    **{"SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]"},
    "SLURM_NTASKS": "4",
}


def test_task_becomes_rank() -> None:
    task = slurm_environment.read_task(TASK)
    assert task is not None
    found = slurm_environment.torch_variables(task, TASK)
    port = found.pop("MASTER_PORT")
    names = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    assert found == {**names, "MASTER_ADDR": "n1"}
    assert 20000 <= int(port) < 30000
    other = slurm_environment.read_task({**TASK, "SLURM_STEP_ID": "1"})
    assert other is not None
    assert other.port != int(port), "two steps of a job may run at the same time"
    mine = {**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert slurm_environment.torch_variables(task, mine)["MASTER_ADDR"] == "10.0.0.1"
    assert slurm_environment.torch_variables(task, mine)["MASTER_PORT"] == "29500"


@pytest.mark.parametrize(("visible", "local"), [("0", "0"), ("0,1", "1"), ("", "1")])
def test_single_visible_gpu_has_local_rank_0(visible: str, local: str) -> None:
    task = slurm_environment.read_task(TASK)
    assert task is not None
    assert (
        slurm_environment.torch_variables(task, {"CUDA_VISIBLE_DEVICES": visible})["LOCAL_RANK"]
        == local
    )
