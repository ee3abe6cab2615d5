"""Bring the parts of a checkpoint to the nodes that read them, where nodes share no disk.

Each node is given a view of the checkpoint: a directory with links to its own files, and with those
that its ranks need and other nodes have. What is damaged on one node is taken from another.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import CheckFailed
from orchestrator.common.files import delete, make_private
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.engine.saving import carry
from orchestrator.engine.saving.carry import Errand
from orchestrator.engine.saving.reader import METADATA, CheckpointReader, TensorPlanner
from orchestrator.records import checkpoint_manifest, checkpoint_parts, checkpoint_store
from orchestrator.records.checkpoint_manifest import Manifest
from orchestrator.records.checkpoint_parts import Candidate, Holding
from orchestrator.records.checkpoint_store import Checkpoint

Damaged = tuple[int, str, str]  # node, checksum of the manifest, file


@dataclass(frozen=True)
class View:
    """A checkpoint as this node can read it."""

    directory: Path
    manifest: Manifest
    came: int  # bytes from other nodes


def pool(checkpoints: Sequence[Checkpoint], ranks: Ranks) -> list[Candidate]:
    """Put together what all nodes have, the newest first."""
    first = ranks.rank == ranks.neighbours[0]
    mine = (
        [holding for checkpoint in checkpoints if (holding := held(checkpoint, node_of(ranks)))]
        if first
        else []
    )
    return checkpoint_parts.candidates(checkpoint for some in gather(mine) for checkpoint in some)


def held(checkpoint: Checkpoint, node: int) -> Holding | None:
    """Tell what this node has of a checkpoint; of what others may have written, nothing."""
    if not checkpoint.files or checkpoint.foreign:
        return None
    try:
        manifest = (checkpoint.path / checkpoint_manifest.NAME).read_bytes()
    except OSError:
        return None
    here = frozenset(
        name
        for name, record in checkpoint.files.items()
        if not checkpoint_manifest.mis_sized(checkpoint.path, name, record)
    )
    return Holding(
        node,
        checkpoint.step,
        checkpoint.save,
        checkpoint.created,
        hashlib.sha256(manifest).hexdigest(),
        checkpoint.files,
        here,
        checkpoint.hosts,
        str(checkpoint.path),
        checkpoint.generation,
    )


def node_of(ranks: Ranks) -> int:
    return ranks.nodes[ranks.rank][0]


class Placing:
    """The way of one candidate to the nodes; `damaged` grows with what is found to be so."""

    def __init__(self, candidate: Candidate, ranks: Ranks, room: Path) -> None:
        self.candidate, self.ranks, self.room = candidate, ranks, room
        self.node, self.members = node_of(ranks), carry.of_nodes(ranks.nodes)
        self.version = candidate.version_for(self.node)
        self.here = {
            manifest: Path(holding.path)
            for manifest, version in candidate.versions.items()
            for holding in version.holdings
            if holding.node == self.node
        }
        self.token = gather(secrets.token_hex(4))[0]
        self.damaged: set[Damaged] = set()
        self.came = 0

    @property
    def first(self) -> bool:
        return self.ranks.rank == self.ranks.neighbours[0]

    def manifest(self) -> Manifest:
        """Read the manifest, here or on a node that has it."""
        offered: dict[str, bytes] = {}
        for name, version in self.candidate.versions.items():
            holder = version.holdings[0].node
            if holder == self.node and self.first:
                with contextlib.suppress(OSError):
                    offered[name] = (self.here[name] / checkpoint_manifest.NAME).read_bytes()
        texts = {name: text for of_rank in gather(offered) for name, text in of_rank.items()}
        return checkpoint_manifest.parse(texts[self.version])

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        """Make an empty directory for the view, and remove it at the end."""
        problem, view = "", Path()
        if self.first:
            try:
                view = self.make()
            except OSError as error:
                problem = f"{self.room}: {error.strerror or error}"
        made = gather((problem, view))
        if trouble := next((text for text, _ in made if text), ""):
            raise CheckFailed(f"there is no place for the parts of a checkpoint: {trouble}")
        view = made[self.ranks.neighbours[0]][1]
        try:
            yield view
        finally:
            if self.first:
                delete(view)

    def make(self) -> Path:
        """Make it where checkpoints are saved, or else where there is room for what goes soon."""
        name = checkpoint_store.partial(self.room, self.candidate.step, self.token).name
        try:
            self.room.mkdir(parents=True, exist_ok=True)
            make_private(self.room / name)
            return self.room / name
        except OSError:
            return Path(tempfile.mkdtemp(prefix=name))

    def bring(self, view: Path, needs: set[str]) -> None:
        """Link what this node has of these files, and fetch the others."""
        problem = ""
        if self.first and self.version in self.here:
            try:
                self.link(view, needs)
            except OSError as error:
                problem = f"{view}: {error.strerror or error}"
        everyone = gather((self.node, needs, problem))
        refuse(problem for _, _, problem in everyone)
        wanted: dict[int, set[str]] = {}
        for node, names, _ in everyone:
            wanted.setdefault(node, set()).update(names)
        errands = self.errands(wanted)
        problems = carry.carry(
            errands,
            self.ranks.rank,
            host_group(),
            lambda errand: self.here[errand.kind] / errand.name,
            lambda errand: view / errand.name,
        )
        self.came += sum(
            errand.record.size for errand in errands if errand.target in self.members_here
        )
        refuse(gather("; ".join(p for p in problems.values() if p != carry.DAMAGED)))
        self.note({self.damage(errand) for errand in problems})

    @property
    def members_here(self) -> list[int]:
        return self.members[self.node]

    def link(self, view: Path, needs: set[str]) -> None:
        path = self.here[self.version]
        held = {
            name
            for holding in self.candidate.versions[self.version].holdings
            if holding.node == self.node
            for name in holding.here
        }
        for name in sorted(needs & held):
            (view / name).symlink_to(path / name)

    def errands(self, wanted: Mapping[int, set[str]]) -> list[Errand]:
        plan = checkpoint_parts.deliveries(self.candidate, wanted)
        errands = []
        for number, delivery in enumerate(plan):
            giving, taking = self.members[delivery.source], self.members[delivery.target]
            source, target = carry.spread_over_ranks(number, giving, taking)
            errands.append(
                Errand(source, target, delivery.name, delivery.record, delivery.manifest)
            )
        return errands

    def damage(self, errand: Errand) -> Damaged:
        return self.ranks.nodes[errand.source][0], errand.kind, errand.name

    def note(self, damaged: set[Damaged]) -> None:
        self.damaged |= {of_rank for some in gather(damaged) for of_rank in some}

    def needs(self, view: Path, state: dict[str, Tensor], manifest: Manifest) -> set[str]:
        """Name the files that the ranks of this node read."""
        try:
            needed = files_for(view, state)
        except Exception:  # noqa: BLE001 (load() meets it again, and says what it is)
            needed = set(manifest.files)
        neighbours = set(self.ranks.neighbours)
        everyone = gather(needed & set(manifest.files))
        return set().union(*(names for rank, names in enumerate(everyone) if rank in neighbours))

    def verify(self, view: Path, needs: set[str]) -> None:
        """Read every byte of this node's own files; its ranks share the work."""
        version = self.candidate.versions[self.version]
        links = sorted(name for name in needs if (view / name).is_symlink())
        mine = self.ranks.neighbours.index(self.ranks.rank)
        bad = set()
        for name in links[mine :: len(self.ranks.neighbours)]:
            try:
                good = checkpoint_manifest.digest(view / name) == version.files[name]
            except OSError:
                good = False
            if not good:
                bad.add((self.node, self.version, name))
        self.note(bad)


def refuse(problems: Iterator[str] | Sequence[str]) -> None:
    if trouble := next((text for text in problems if text), ""):
        raise CheckFailed(
            f"the parts of a checkpoint could not be placed: {trouble}",
            "free some space there, or set checkpoint.directory to another disk",
        )


def files_for(view: Path, state: dict[str, Tensor]) -> set[str]:
    """Plan this rank's reading as torch will, and name the files of the plan."""
    metadata = CheckpointReader(view).read_metadata()
    planner = TensorPlanner()
    planner.set_up_planner(dict(state), metadata, is_coordinator=False)
    items = planner.create_local_plan().items
    return {metadata.storage_data[item.storage_index].relative_path for item in items}


@contextlib.contextmanager
def placed(
    candidate: Candidate, ranks: Ranks, room: Path, state: dict[str, Tensor]
) -> Iterator[View | Candidate]:
    """Give each node a view of a checkpoint; or what is left of it, once that is not whole."""
    while candidate.whole:
        placing = Placing(candidate, ranks, room)
        with placing.directory() as view:
            manifest = placing.manifest()
            placing.bring(view, {METADATA})
            if not placing.damaged:
                needs = placing.needs(view, state, manifest)
                placing.bring(view, needs - {METADATA})
                placing.verify(view, needs | {METADATA})
            if not placing.damaged:
                yield View(view, manifest, placing.came)
                gather(None)  # nobody removes what a neighbour still reads
                return
        candidate = candidate.without(placing.damaged)
    yield candidate


def group_of_a_node(ranks: Ranks) -> dist.ProcessGroup | None:
    """Make a group for each node, whose ranks read one view."""
    group = None
    for node, members in sorted(carry.of_nodes(ranks.nodes).items()):
        new = dist.new_group(members, backend="gloo")
        group = new if node == node_of(ranks) else group
    return group
