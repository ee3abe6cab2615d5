"""What a node makes of its first part for its part of a later attempt."""

from __future__ import annotations

import pytest

from orchestrator.node.server.visit import Refusal
from orchestrator.node.start.start import next_spec
from orchestrator.protocol.requests.start import StartAgain
from orchestrator.protocol.spec import Attempt, LeaseTerms, Spec, Target

FIRST = Spec(
    job="run-1",
    node=3,
    nnodes=3,
    experiment="run",
    nproc=2,
    first_rank=4,
    start="fork",
    agent=(
        *("python3", "-u", "agent.py", "--nnodes=3", "--node-rank=3", "--nproc-per-node=2"),
        *("--master-addr=10.0.0.1", "--master-port=29500", "--local-addr=10.0.0.4"),
    ),
    env={"NODE_RANK": "3", "NNODES": "3", "ORCHESTRATOR_JOB": "run-1", "SECRET": "x"},
    unset=(),
    workdir="/job",
    target=Target(kind="script", name="train.py"),
    lease=LeaseTerms(address="10.0.0.1", port=1, token="old"),
    fresh=True,
)
ASKED = StartAgain(
    job="run-1.2",
    node=0,
    attempt=Attempt(number=2, restarts=3, first_job="run-1", first_node=3),
    port=29501,
    peers_port=2,
    token="new",
    nnodes=2,
    first_rank=0,
    master="10.0.0.4",
)


def test_a_spare_becomes_the_master_of_fewer_nodes() -> None:
    spec = next_spec(FIRST, ASKED)
    assert spec.agent == (
        *("python3", "-u", "agent.py", "--nnodes=2", "--node-rank=0", "--nproc-per-node=2"),
        *("--master-addr=10.0.0.4", "--master-port=29501", "--local-addr=10.0.0.4"),
    )
    assert spec.env == {
        **{"NODE_RANK": "0", "NNODES": "2", "ORCHESTRATOR_JOB": "run-1.2"},
        "SECRET": "x",
    }
    assert (spec.node, spec.nnodes, spec.first_rank, spec.port) == (0, 2, 0, 29501)
    assert spec.lease and (spec.lease.address, spec.lease.port, spec.lease.token) == (
        *("10.0.0.4", 2),
        "new",
    )
    assert next_spec(FIRST, ASKED.replace(node=1)).port == 0


def test_accelerate_starts_again_on_its_own_nodes() -> None:
    first = FIRST.replace(agent=("accelerate", "launch", "--main_process_port=29500"))
    same = ASKED.replace(node=3, nnodes=3)
    assert next_spec(first, same).agent == ("accelerate", "launch", "--main_process_port=29501")
    for other in (ASKED.replace(node=3), ASKED.replace(nnodes=3)):
        with pytest.raises(Refusal, match="wants the nodes that it had"):
            next_spec(first, other)
