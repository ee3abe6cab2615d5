"""Finds out whether the nodes of the next attempt reach each other, where the last one broke."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.protocol.requests.machine import Dial, Listen
from orchestrator.protocol.timing import QUICK_ANSWER_SECONDS
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.outcome import Verdict

log = logging.getLogger(__name__)

BROKE = ("lost", "link", "hang", "communication")  # kinds of failures that a cut link may be
DIAL_SECONDS = 3.0

Pairs = Collection[tuple[str, str]]  # names of nodes: who cannot reach whom


def may_be_cut(verdict: Verdict | None) -> bool:
    """Tell whether a link between nodes may be the reason why an attempt ended."""
    return verdict is not None and verdict.kind in BROKE


def apart(nodes: Sequence[NodeRecord], channels: Mapping[str, NodeChannel]) -> Pairs:
    """Let each node call each other; what a node does not answer says nothing about its links."""
    words = {node.name: secrets.token_hex(8) for node in nodes}
    ports: dict[str, int] = {}

    def listen(node: NodeRecord) -> None:
        seconds = 2 * QUICK_ANSWER_SECONDS
        request = Listen(ports=(0,), word=words[node.name], seconds=seconds)
        for port in channels[node.name].ask(request, QUICK_ANSWER_SECONDS).ports:
            ports[node.name] = port

    def dial(node: NodeRecord) -> list[tuple[str, str]]:
        others = [one for one in nodes if one is not node and ports.get(one.name)]
        places = tuple((one.address, ports[one.name], words[one.name]) for one in others)
        answer = channels[node.name].ask(
            Dial(places=places, seconds=DIAL_SECONDS), QUICK_ANSWER_SECONDS
        )
        answers = zip(others, answer.answers, strict=False)
        return [(node.name, one.name) for one, problem in answers if problem]

    fleet.everywhere(nodes, listen)
    log.debug("ports at which nodes were called by each other: %s", ports)
    found = [
        pairs for pairs in fleet.everywhere(nodes, dial) if not isinstance(pairs, OrchestratorError)
    ]
    return [pair for pairs in found for pair in pairs]


def who_leaves(pairs: Pairs, nodes: Sequence[str], blamed: str | None) -> str:
    """Choose the node without which most of the others reach each other.

    Of two nodes that miss only each other it is the one that the verdict has named, or the later.
    """
    broken = Counter(name for pair in pairs for name in set(pair))
    return max(nodes, key=lambda name: (broken[name], name == blamed, nodes.index(name)))


def in_words(name: str, pairs: Pairs) -> str:
    """Say whom a node cannot reach, in words after its name."""
    others = sorted({other for pair in pairs if name in pair for other in pair if other != name})
    return f"and {', '.join(others)} cannot reach each other"
