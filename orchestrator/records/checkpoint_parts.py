"""Finds a whole checkpoint in parts on several nodes, and plans who gives which file to whom.

Every node tells what it holds. A checkpoint has one manifest, if all nodes wrote it together; or
one for each node, if each wrote all of it by itself. Pure: for the ranks and for the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.common.errors import CheckFailed
from orchestrator.records.checkpoint_manifest import FileRecord, shown

MOST_NAMED = 5


@dataclass(frozen=True)
class Holding:
    """The part of one checkpoint that one node has."""

    node: int
    step: int
    save: str  # with the step, the name of a state: the same on all nodes
    created: float
    manifest: str  # the checksum of manifest.json
    files: Mapping[str, FileRecord]  # all that there are, wherever
    here: frozenset[str]  # those that this node has
    hosts: Mapping[str, str]  # the host that wrote each, if there were several
    path: str = ""  # of its directory
    run: str = ""  # that training, over all its attempts
    in_memory: bool = False


@dataclass(frozen=True)
class Version:
    """A manifest, and who has which of its files."""

    files: Mapping[str, FileRecord]
    hosts: Mapping[str, str]
    holdings: tuple[Holding, ...]

    def holders(self, name: str) -> list[int]:
        return [holding.node for holding in self.holdings if name in holding.here]

    @property
    def lacking(self) -> list[str]:
        """List the files that no node has."""
        there = frozenset[str]().union(*(holding.here for holding in self.holdings))
        return [name for name in self.files if name not in there]


@dataclass(frozen=True)
class Candidate:
    """A state that can perhaps be loaded."""

    step: int
    save: str
    created: float  # the last of its nodes
    versions: Mapping[str, Version]  # by the checksum of the manifest
    run: str = ""
    in_memory: bool = False

    @property
    def whole(self) -> bool:
        return any(not version.lacking for version in self.versions.values())

    def version_for(self, node: int) -> str:
        """Choose the version that a node reads: its own, if that is whole."""
        whole = {name: each for name, each in self.versions.items() if not each.lacking}
        local = {holding.node: name for name, each in whole.items() for holding in each.holdings}
        return local.get(node) or min(whole)

    def without(self, damaged: Iterable[tuple[int, str, str]]) -> Candidate:
        """Forget (node, manifest, file) that cannot be trusted."""
        bad = set(damaged)
        versions = {}
        for name, version in self.versions.items():
            holdings = tuple(
                replace(
                    holding,
                    here=frozenset(f for f in holding.here if (holding.node, name, f) not in bad),
                )
                for holding in version.holdings
            )
            versions[name] = replace(version, holdings=holdings)
        return replace(self, versions=versions)

    def shortage(self) -> str:
        """Say which files nobody has, and whose disk they were on."""
        nearest = min(self.versions.values(), key=lambda version: len(version.lacking))
        lacking = nearest.lacking
        names = [
            shown(name) + (f" (written by {shown(host)})" if host else "")
            for name in lacking[:MOST_NAMED]
            for host in [nearest.hosts.get(name)]
        ]
        more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
        return f"step {self.step} lacks {', '.join(names)}{more}"


def candidates(holdings: Iterable[Holding]) -> list[Candidate]:
    """Put together what the nodes hold; the state that was saved last comes first."""
    states: dict[tuple[int, str], dict[str, list[Holding]]] = {}
    for holding in holdings:
        state = states.setdefault((holding.step, holding.save), {})
        state.setdefault(holding.manifest, []).append(holding)
    found = []
    for (step, save), parts in states.items():
        versions = {
            manifest: Version(held[0].files, held[0].hosts, tuple(held))
            for manifest, held in parts.items()
        }
        last = max(
            (holding for held in parts.values() for holding in held), key=lambda each: each.created
        )
        found.append(
            Candidate(
                step,
                save,
                last.created,
                versions,
                run=last.run,
                in_memory=last.in_memory,
            )
        )
    return sorted(found, key=lambda each: (each.created, each.step, each.save), reverse=True)


@dataclass(frozen=True)
class Delivery:
    """A file that one node gives to another."""

    source: int
    target: int
    manifest: str
    name: str
    record: FileRecord


def deliveries(candidate: Candidate, needs: Mapping[int, Iterable[str]]) -> list[Delivery]:
    """Bring every node the files that it needs and lacks, from those that have least to give."""
    sent: dict[int, int] = {}
    plan = []
    for node in sorted(needs):
        manifest = candidate.version_for(node)
        version = candidate.versions[manifest]
        for name in sorted(set(needs[node])):
            holders = version.holders(name)
            if node in holders:
                continue
            source = min(holders, key=lambda holder: (sent.get(holder, 0), holder))
            record = version.files[name]
            sent[source] = sent.get(source, 0) + record.size
            plan.append(Delivery(source, node, manifest, name, record))
    return plan


def nothing_whole(found: Sequence[Candidate]) -> CheckFailed:
    """Say why none of the checkpoints that were found can be loaded."""
    lines = "\n    ".join(candidate.shortage() for candidate in found[:MOST_NAMED])
    return CheckFailed(
        f"no checkpoint is whole on the nodes of this job:\n    {lines}",
        "launch on nodes that have these files, too, or bring them from there: orchestrator pull"
        " --checkpoints EXP; orchestrator push experiments/EXP/outputs/checkpoints DIR; --set"
        " checkpoint.resume=DIR. checkpoint.resume=never starts from the beginning, and"
        " checkpoint.copies=2 keeps each part on two nodes from then on",
    )
