"""When a port that cannot be reached is called the cause, and when it is not."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.head.follow.monitors import watchers
from orchestrator.head.follow.monitors.watchers import StartMonitor
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.requests.machine import Dialed
from tests.head.follow.monitors.test_hang import Clock

SILENCE, REFUSED = "no answer in 3 s", "connection refused"


@dataclass
class CalledFollower:
    """The part of a follower that the monitor uses."""

    index: int
    requests: list[Any] = field(default_factory=list)

    @property
    def node(self) -> "CalledFollower":
        return self

    @property
    def name(self) -> str:
        return f"n{self.index}"

    def ask(self, request: Any) -> None:
        self.requests.append(request)


def watch(
    monkeypatch: pytest.MonkeyPatch,
    rounds: list[dict[int, str]],
    *,
    nodes: int = 3,
    begun_after: float = 1000.0,
) -> tuple[Failure | None, float, int]:
    """Answer the calls of each round; return the failure, when it came, and how often was asked."""
    clock = Clock()
    monkeypatch.setattr(watchers, "time", clock)
    monitor = StartMonitor("fd00::1:29500" if nodes == 2 else "10.0.0.1:29500")
    followers = [CalledFollower(index) for index in range(nodes)]
    asked = 0
    for tenth in range(600):
        clock.now = 100.0 + tenth / 10
        failure = monitor.check(followers, begun=tenth / 10 > begun_after)  # type: ignore[arg-type]
        if failure:
            return failure, tenth / 10, asked
        if len(followers[0].requests) > asked:
            for node, why in rounds[min(asked, len(rounds) - 1)].items():
                monitor.answers[node] = Dialed(answers=(why,))
            asked += 1
    return None, 60.0, asked


def test_closed_port_is_reported_within_30_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure, after, asked = watch(monkeypatch, [{0: "", 1: SILENCE, 2: ""}])
    assert failure is not None
    assert failure.message == (
        "the ranks cannot meet at 10.0.0.1:29500, the master's port: from node 1 (n1):"
        " no answer in 3 s"
    )
    assert failure.kind == "communication" and "open all TCP ports" in failure.fix
    assert (after + 2 * watchers.DIAL_SECONDS < 30, asked) == (True, 2)


@pytest.mark.parametrize(
    ("rounds", "nodes", "blamed"),
    [
        # Torch is still being imported.
        ([{0: REFUSED, 1: REFUSED, 2: REFUSED}], 3, ""),
        # Nothing is known while this lasts.
        ([{0: REFUSED, 1: SILENCE, 2: SILENCE}], 3, ""),
        ([{0: "", 1: REFUSED, 2: REFUSED}], 3, "node 1 (n1): connection refused; node 2"),
        # A firewall resets the connection.
        ([{0: REFUSED, 1: REFUSED}, {0: "", 1: REFUSED}], 2, "node 1"),
        # The loss lasted a moment.
        ([{0: "", 1: SILENCE, 2: ""}, {0: "", 1: "", 2: ""}], 3, ""),
        ([{0: "", 1: SILENCE, 2: ""}, {0: "", 1: "", 2: SILENCE}, {0: "", 1: "", 2: ""}], 3, ""),
        # Its firewall drops its own calls.
        ([{0: SILENCE, 1: SILENCE, 2: SILENCE}], 3, "node 0"),
        # The master is silent and may be lost.
        ([{1: SILENCE, 2: SILENCE}], 3, ""),
        ([{0: "", 1: "", 2: ""}], 3, ""),
    ],
)
def test_failure_blames_right_side_of_closed_port(
    monkeypatch: pytest.MonkeyPatch, rounds: list[dict[int, str]], nodes: int, blamed: str
) -> None:
    failure, _, _ = watch(monkeypatch, rounds, nodes=nodes)
    assert blamed in failure.message if failure and blamed else failure is None and not blamed


def test_dial_is_skipped_once_ranks_began_or_with_one_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert watch(monkeypatch, [{0: "", 1: SILENCE}], begun_after=5.0)[2] == 0
    assert watch(monkeypatch, [{0: SILENCE}], nodes=1)[2] == 0
