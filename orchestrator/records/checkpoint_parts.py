"""Combines the parts of a checkpoint on several nodes, and plans which node sends which file.

The input is what each node reports that it holds. A checkpoint has one manifest if all nodes wrote
it together. It has one for each node if each node wrote all of it. The module has no side effects;
ranks and the head use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import CheckFailed
from orchestrator.records.checkpoint_manifest import FileRecord, shown_name

MOST_NAMED = 5


@dataclass(frozen=True)
class Holding:
    """The part of one checkpoint that one node has."""

    node: int
    step: int
    # Identifies a state together with the step. It is the same on all nodes.
    save: str
    created: float
    # The checksum of manifest.json.
    manifest: str
    # All files of the checkpoint, on any node.
    files: Mapping[str, FileRecord]
    # The files that this node has.
    here: frozenset[str]
    # The host that wrote each file, if there were several hosts.
    hosts: Mapping[str, str]
    # The directory of the checkpoint on that node.
    path: str = ""
    # The ID of its training, which is the same for all attempts.
    run: str = ""
    in_memory: bool = False


# The holdings of all nodes under one manifest.
Version = tuple[Holding, ...]


def list_holders(version: Version, name: str) -> list[int]:
    return [holding.node for holding in version if name in holding.here]


def lacking(version: Version) -> list[str]:
    """Return the files that no node has."""
    return [name for name in version[0].files if not list_holders(version, name)]


@dataclass(frozen=True)
class CheckpointCandidate:
    """A state that can be loaded if the nodes together have all files of it."""

    step: int
    in_memory: bool
    # Keyed by the checksum of the manifest.
    versions: Mapping[str, Version]

    @property
    def whole(self) -> bool:
        return any(not lacking(version) for version in self.versions.values())

    def version_for(self, node: int) -> Version:
        """Return the version that a node reads: its own if whole, else another whole one."""
        whole = {name: each for name, each in self.versions.items() if not lacking(each)}
        local = (each for each in whole.values() for holding in each if holding.node == node)
        return next(local, None) or whole[min(whole)]

    def shortage(self) -> str:
        """Describe the files that no node has, and the hosts that wrote them."""
        hosts, names = min(
            ((version[0].hosts, lacking(version)) for version in self.versions.values()),
            key=lambda each: len(each[1]),
        )
        shown_names = [
            shown_name(name) + (f" (written by {shown_name(hosts[name])})" if name in hosts else "")
            for name in names[:MOST_NAMED]
        ]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"step {self.step} lacks {', '.join(shown_names)}{more}"


def list_candidates(holdings: Iterable[Holding]) -> list[CheckpointCandidate]:
    """Group the holdings of all nodes by state. The state that was saved last comes first."""
    states: dict[tuple[int, str], dict[str, Version]] = {}
    for holding in holdings:
        state = states.setdefault((holding.step, holding.save), {})
        state[holding.manifest] = (*state.get(holding.manifest, ()), holding)
    found = []
    for (step, save), versions in states.items():
        held = [holding for version in versions.values() for holding in version]
        created = max(holding.created for holding in held)
        candidate = CheckpointCandidate(step, held[0].in_memory, versions)
        found.append(((created, step, save), candidate))
    return [candidate for _, candidate in sorted(found, key=lambda each: each[0], reverse=True)]


@dataclass(frozen=True)
class Delivery:
    """The transfer of one file from a node, or one of its ranks, to another."""

    source: int
    target: int
    name: str
    record: FileRecord


def plan_deliveries(
    candidate: CheckpointCandidate, needs: Mapping[int, Iterable[str]]
) -> list[Delivery]:
    """Plan transfers of the files that nodes need and lack.

    Each file comes from the holder that has the fewest bytes to send so far.
    """
    sent: dict[int, int] = {}
    plan = []
    for node in sorted(needs):
        version = candidate.version_for(node)
        for name in sorted(set(needs[node])):
            having = list_holders(version, name)
            if node in having:
                continue
            source = min(having, key=lambda holder: (sent.get(holder, 0), holder))
            record = version[0].files[name]
            sent[source] = sent.get(source, 0) + record.size
            plan.append(Delivery(source, node, name, record))
    return plan


def no_checkpoint_error(found: Sequence[CheckpointCandidate]) -> CheckFailed:
    """Return the error for a job whose nodes have no whole checkpoint."""
    lines = "\n    ".join(candidate.shortage() for candidate in found[:MOST_NAMED])
    return CheckFailed(
        f"no checkpoint is whole on the nodes of this job:\n    {lines}",
        "launch on nodes that have these files as well, or bring them from there: orchestrator pull"
        " --checkpoints EXP; orchestrator push experiments/EXP/outputs/checkpoints DIR; --set"
        " checkpoint.resume=DIR. checkpoint.resume=never starts from the beginning, and"
        " checkpoint.copies=2 keeps each part on two nodes from then on",
    )
