"""A node derives its part of a later attempt from its first part."""

from pathlib import Path

import pytest

from orchestrator.head.plan.plan import OF_TORCHRUN
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.session import Refusal
from orchestrator.node.start.start import part_of
from orchestrator.protocol.requests.request import NO_PART
from orchestrator.protocol.requests.start import Start
from orchestrator.protocol.spec import AttemptNumber, Placement, Spec, Target

FIRST = Spec(
    job="run-1",
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
)
PLACE = Placement(
    job="run-1.2",
    node=0,
    attempt=AttemptNumber(number=2, restarts=3, first_job="run-1", first_node=3),
    port=29501,
    supervisors="10.0.0.4",
    supervisors_port=2,
    token="new",
    nnodes=2,
    first_rank=0,
    master="10.0.0.4",
)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A node that has its part of the job's first attempt."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    run = RunDir("run-1", 3)
    run.create()
    run.write_spec(FIRST)
    return run


def test_spare_becomes_master_of_fewer_nodes() -> None:
    spec = part_of(Start(place=PLACE))
    assert spec.command == [
        *("python3", "-u", "agent.py", "--nproc-per-node=2", "--local-addr=10.0.0.4"),
        *("--nnodes=2", "--node-rank=0", "--master-addr=10.0.0.4", "--master-port=29501"),
    ]
    assert spec.env == {
        **{"NODE_RANK": "0", "NNODES": "2", "ORCHESTRATOR_JOB": "run-1.2"},
        "SECRET": "x",
    }
    assert (spec.node, spec.nnodes, spec.first_rank, spec.port) == (0, 2, 0, 29501)
    assert (spec.supervisors, spec.supervisors_port, spec.token) == ("10.0.0.4", 2, "new")
    assert spec.attached


def test_accelerate_restarts_on_same_nodes_alone(kept: RunDir) -> None:
    placed = (("port", "--main_process_port"),)
    Path(kept.spec).unlink()
    kept.write_spec(FIRST.replace(agent=("accelerate", "launch"), placed=placed))
    same = PLACE.replace(node=3, nnodes=3)
    command = part_of(Start(place=same)).command
    assert command == ["accelerate", "launch", "--main_process_port=29501"]
    for other in (PLACE.replace(node=3), PLACE.replace(nnodes=3)):
        with pytest.raises(Refusal, match="wants the nodes that it had"):
            part_of(Start(place=other))


def test_missing_spec_is_reported_as_lost_part(kept: RunDir) -> None:
    Path(kept.spec).unlink()
    with pytest.raises(Refusal, match="has lost its part of the job") as lost:
        part_of(Start(place=PLACE))
    assert lost.value.kind == NO_PART
