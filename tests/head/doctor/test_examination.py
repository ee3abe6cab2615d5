"""The doctor's questions to nodes and its use of the answers, which a function gives here."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.doctor.examination import Ask, Diagnosis, diagnose_nodes
from orchestrator.head.doctor.findings import BAD, Examined, Needs
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.requests.machine import (
    Dial,
    Dialed,
    Examine,
    Listen,
    Listening,
)
from orchestrator.protocol.requests.request import Request
from tests.head.plan.probed import facts

# This returns the n-th node's answer to a request.
Answer = Callable[[int, Any], Any]


def nodes(count: int) -> list[ProbedNode]:
    return [
        ProbedNode(Node(f"n{i}"), facts(f"eth0 10.0.0.{i}/24", port=29500), f"10.0.0.{i}")
        for i in range(1, count + 1)
    ]


def sound(index: int, request: Any) -> Any:
    if isinstance(request, Examine):
        return Checkup()
    if isinstance(request, Listen):
        return Listening(ports=tuple(port or 4000 + index for port in request.ports))
    return Dialed(answers=("",) * len(request.places))


def examined(answer: Answer, *lost: Examined) -> tuple[Diagnosis, list[list[Request[Any]]]]:
    """Examine three nodes; return the diagnosis and all requests."""
    rounds: list[list[Request[Any]]] = []

    def ask(requests: Sequence[Request[Any]], timeout: float) -> list[Any]:
        rounds.append(list(requests))
        return [answer(index, request) for index, request in enumerate(requests)]

    needs = Needs(script="x.py")
    asking: Ask = ask
    return diagnose_nodes(nodes(3), lost, needs, asking), rounds


def test_every_node_calls_every_other() -> None:
    diagnosis, (looks, listens, dials) = examined(sound)
    assert diagnosis.case.full and not diagnosis.case.silent
    assert [look.script for look in looks if isinstance(look, Examine)] == ["x.py"] * 3
    secrets = [listen.word for listen in listens if isinstance(listen, Listen)]
    assert [listen.ports for listen in listens if isinstance(listen, Listen)] == [
        *((29500, 0), (0,), (0,))  # the master also where the ranks will meet
    ]
    places = [dial.places for dial in dials if isinstance(dial, Dial)]
    first = [("10.0.0.1", 29500, secrets[0]), ("10.0.0.1", 4000, secrets[0])]
    second, third = ("10.0.0.2", 4001, secrets[1]), ("10.0.0.3", 4002, secrets[2])
    assert places == [(second, third), (*first, third), (*first, second)]


def test_diagnose_without_channels_uses_facts_alone() -> None:
    lost = Examined("n4", error="no answer")
    case = diagnose_nodes(nodes(2), [lost], Needs()).case
    assert not case.full and [node.name for node in case.nodes] == ["n1", "n2", "n4"]
    assert case.addresses["n2"].address == "10.0.0.2"


def test_failed_call_is_recorded_by_pair() -> None:
    def answer(index: int, request: Any) -> Any:
        if isinstance(request, Dial) and index == 2:
            return Dialed(answers=("", "refused", ""))
        return sound(index, request)

    diagnosis, _ = examined(answer)
    assert diagnosis.case.silent == {("n3", "n1", 4000): "refused"}


def test_node_that_cannot_listen_is_still_examined() -> None:
    def answer(index: int, request: Any) -> Any:
        if index == 1 and not isinstance(request, Dial):
            return NodeError("too slow")
        return sound(index, request)

    diagnosis, (_, _, dials) = examined(answer)
    assert [node.error for node in diagnosis.case.nodes] == ["", "too slow", ""]
    assert [len(dial.places) for dial in dials if isinstance(dial, Dial)] == [1, 3, 2]


@pytest.mark.parametrize(
    ("kind", "when"), [(Dial, "it called the others"), (Listen, "it was called")]
)
def test_node_lost_during_examination_is_named(kind: type, when: str) -> None:
    def answer(index: int, request: Any) -> Any:
        if isinstance(request, Dial) and index == 2:
            return Dialed(answers=("refused",))
        lost = index == 1 and isinstance(request, kind)
        return NodeError("it hung up") if lost else sound(index, request)

    diagnosis, _ = examined(answer)
    bad = {finding.what for finding in diagnosis.findings if finding.level == BAD}
    assert f"n2: it was lost while {when}: it hung up" in bad
    assert list(diagnosis.case.silent.values()) == ["refused"]
