"""A node derives its part of a later attempt from its first part."""

from pathlib import Path

import pytest

from orchestrator.head.plan.plan import OF_TORCHRUN
from orchestrator.node.job.run_directory import PartDir
from orchestrator.node.server.session import Refusal
from orchestrator.node.start.start import spec_at
from orchestrator.protocol.requests.request import NO_PART, OTHER_VERSION
from orchestrator.protocol.spec import Placement, Spec, Target
from orchestrator.protocol.version import OWN, Version

FIRST = Spec(
    job="run-1",
    part=3,
    node=3,
    nnodes=3,
    experiment="run",
    nproc=2,
    first_rank=4,
    start="fork",
    agent=("python3", "-u", "agent.py", "--nproc-per-node=2", "--local-addr=10.0.0.4"),
    placed=OF_TORCHRUN,
    master="10.0.0.1",
    port=29500,
    env={"NODE_RANK": "3", "NNODES": "3", "ORCHESTRATOR_JOB": "run-1", "SECRET": "x"},
    unset=(),
    workdir="/job",
    target=Target(kind="script", name="train.py"),
    supervisors="10.0.0.1",
    supervisors_port=1,
    token="old",
    version=OWN,
)
PLACE = Placement(
    job="run-1",
    part=3,
    attempt=2,
    node=0,
    port=29501,
    supervisors="10.0.0.4",
    supervisors_port=2,
    token="new",
    nnodes=2,
    first_rank=0,
    master="10.0.0.4",
)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartDir:
    """A node that has its part of the job's first attempt."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    part = PartDir("run-1", 3)
    Path(part.home).mkdir(parents=True)
    part.write_spec(FIRST)
    return part


def test_spare_becomes_master_of_fewer_nodes() -> None:
    spec = spec_at(PLACE)
    assert spec.command == [
        *("python3", "-u", "agent.py", "--nproc-per-node=2", "--local-addr=10.0.0.4"),
        *("--nnodes=2", "--node-rank=0", "--master-addr=10.0.0.4", "--master-port=29501"),
    ]
    assert spec.env == {
        **{"NODE_RANK": "0", "NNODES": "2", "ORCHESTRATOR_JOB": "run-1"},
        "SECRET": "x",
    }
    assert (spec.node, spec.nnodes, spec.first_rank, spec.port) == (0, 2, 0, 29501)
    assert (spec.supervisors, spec.supervisors_port, spec.token) == ("10.0.0.4", 2, "new")
    assert spec.attached


def test_accelerate_restarts_on_same_nodes_alone(kept: PartDir) -> None:
    placed = (("port", "--main_process_port"),)
    Path(kept.spec).unlink()
    kept.write_spec(FIRST.replace(agent=("accelerate", "launch"), placed=placed))
    same = PLACE.replace(node=3, nnodes=3)
    command = spec_at(same).command
    assert command == ["accelerate", "launch", "--main_process_port=29501"]
    for other in (PLACE.replace(node=3), PLACE.replace(nnodes=3)):
        with pytest.raises(Refusal, match="wants the nodes that it had"):
            spec_at(other)


def test_missing_spec_is_reported_as_lost_part(kept: PartDir) -> None:
    Path(kept.spec).unlink()
    with pytest.raises(Refusal, match="has lost its part of the job") as lost:
        spec_at(PLACE)
    assert lost.value.kind == NO_PART


def test_spec_of_former_version_is_refused(kept: PartDir) -> None:
    Path(kept.spec).unlink()
    kept.write_spec(FIRST.replace(version=Version(protocol=1, package="0.2.0")))
    with pytest.raises(Refusal, match=r"was started by orchestrator 0\.2\.0") as refused:
        spec_at(PLACE)
    assert refused.value.kind == OTHER_VERSION
