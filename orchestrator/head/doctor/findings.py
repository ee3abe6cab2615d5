"""The doctor's findings, and the facts that they are based on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.common.hosts import join_names
from orchestrator.head.nodes.facts import Facts, nodes_by_value
from orchestrator.head.plan.model import NodeAddress
from orchestrator.head.screen.failures import common_fix
from orchestrator.protocol.facts import Checkup, Disk, Interface

BAD, WARN, UNKNOWN = "bad", "warn", "unknown"


@dataclass(frozen=True)
class Finding:
    """One problem, with all nodes that have it. BAD: a launch would fail or mislead."""

    level: str
    nodes: tuple[str, ...]
    what: str
    # A command to type, or another remedy.
    fix: str = ""
    check: str = ""
    # True if it is about one node, whose name is put before `what`.
    own: bool = False


@dataclass(frozen=True)
class Examined:
    """One node: its own facts, or the reason why it could not be asked."""

    name: str
    facts: Facts | None = None
    reached: str = ""
    error: str = ""
    fix: str = ""
    checkup: Checkup | None = None
    slots: int | None = None
    # True if the node list has a workdir= for it.
    placed: bool = False


@dataclass(frozen=True)
class Needs:
    """A job's demands on its nodes."""

    # The port of the master.
    port: int = 0
    # True if no other port may be used.
    that_port: bool = False
    # The program whose copies on the nodes are compared.
    script: str = ""
    torch: bool = True
    # True if the built-in engine runs, which needs OLDEST_TORCH.
    engine: bool = False
    # True if programs run in the workdir; the engine is sent and needs none.
    workdir: bool = True
    # Ranks on each node, if the user gave --nproc.
    nproc: int | None = None
    # The transport of NCCL's data: Fabric.kind of the plan, if there is one.
    fabric: str = ""


@dataclass(frozen=True)
class Case:
    """All nodes, and the calls between them. Without `full` there are no checkups."""

    nodes: tuple[Examined, ...]
    full: bool
    needs: Needs = Needs()
    # Addresses in the job's network, by node.
    addresses: Mapping[str, NodeAddress] = field(default_factory=dict)
    # (what, fix) if the addresses could not be found.
    network_error: tuple[str, str] | None = None
    # The disk of the experiments.
    head: Disk | None = None
    # (from, to, port) of each failed call -> the reason.
    silent: Mapping[tuple[str, str, int], str] = field(default_factory=dict)

    @property
    def seen(self) -> list[tuple[Examined, Facts]]:
        return [(node, node.facts) for node in self.nodes if node.facts is not None]

    @property
    def checked_in_depth(self) -> list[tuple[Examined, Checkup]]:
        return [(node, node.checkup) for node in self.nodes if node.checkup is not None]

    @property
    def links(self) -> list[tuple[Examined, Interface]]:
        """Return each node's interface in the job's network."""
        known = [(n, f, self.addresses[n.name]) for n, f in self.seen if n.name in self.addresses]
        found = [(node, facts.interface(address.interface)) for node, facts, address in known]
        return [(node, link) for node, link in found if link and link.kind != "loopback"]


def bad_finding(node: Examined, what: str, fix: str = "") -> Finding:
    return Finding(BAD, (node.name,), what, fix, own=True)


def warn_finding(node: Examined, what: str, fix: str = "") -> Finding:
    return Finding(WARN, (node.name,), what, fix, own=True)


def unknown_finding(node: Examined, what: str) -> Finding:
    return Finding(UNKNOWN, (node.name,), what, own=True)


def fold_findings(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield equal findings of several nodes once, with the names of all."""
    alike = nodes_by_value((f, (f.level, f.what, () if f.own else f.nodes)) for f in findings)
    for (level, what, nodes), same in alike.items():
        names = nodes or tuple(dict.fromkeys(name for each in same for name in each.nodes))
        words = f"{join_names(names)}: {what}" if same[0].own else what
        yield Finding(level, names, words, common_fix([each.fix for each in same]), check)


def odd_values(values: Sequence[tuple[str, Any]]) -> tuple[Any, dict[Any, list[str]]]:
    """Return the most frequent value (the first, if tied), and {other value: its nodes}."""
    if not values:
        return None, {}
    counts = Counter(value for _, value in values)
    most = max(counts, key=lambda value: (counts[value], value == values[0][1]))
    return most, nodes_by_value(pair for pair in values if pair[1] != most)


def unequal_values(
    level: str, what: str, values: Sequence[tuple[str, Any]], fix: str = ""
) -> Iterator[Finding]:
    """Yield a finding for each value that most nodes do not have; `fix` may name {most}."""
    most, others = odd_values(values)
    for value, names in others.items():
        sentence = (
            f"{what}: {value or 'none'} on {join_names(names)}, {most or 'none'} on the others"
        )
        yield Finding(level, tuple(names), sentence, fix.format(most=most))
