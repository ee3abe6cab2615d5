"""Loads a state into model and optimizer, from disk or memory, of this node or of others.

Ranks fetch the files that their node lacks from ranks of other nodes, into a directory that exists
during the load. Then torch.distributed.checkpoint reads them, for any layout.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import Say
from orchestrator.engine.ranks.ranks import Ranks, gather_values, host_group, run_together
from orchestrator.engine.saving import nodes, reader, search
from orchestrator.engine.saving.ownership import TrainingRun, saved_by
from orchestrator.engine.saving.reader import METADATA, first_cause, first_names
from orchestrator.engine.saving.search import Find
from orchestrator.engine.saving.state import MODEL, state_of
from orchestrator.records import checkpoint_manifest, checkpoint_parts, checkpoint_store
from orchestrator.records.checkpoint_parts import CheckpointCandidate, Delivery, Version
from orchestrator.records.checkpoint_store import Checkpoint

T = TypeVar("T")
# The number of threads that verify files during the read.
THREADS = 4


class Auxiliary(Protocol):
    """Prepares and restores the state beside the model: optimizers, and a program's own objects."""

    def prime(
        self, progress: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> Mapping[str, Tensor]: ...

    def restore(self, progress: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class LoadTarget:
    """The model and optimizer that a state is loaded into."""

    ranks: Ranks
    run: TrainingRun
    model: nn.Module
    auxiliary: Auxiliary
    say: Say

    def state(self, progress: Any, metadata: Metadata, shown: str) -> dict[str, Tensor]:
        """Check a state by its progress, and return the tensors that it is read into.

        Raise CheckFailed if it does not fit the model.
        """
        saved = metadata.state_dict_metadata
        primed = self.auxiliary.prime(progress["stepper"], saved)
        state = state_of(self.model, primed)
        problem = reader.find_misfit(state, metadata)
        if problem := next(filter(None, gather_values(problem)), ""):
            raise CheckFailed(
                f"{shown} does not fit this model and optimizer: {problem}",
                "resume with the model.* and optimizer.name that it was saved with",
            )
        if strange := [name for name in saved if name.startswith(MODEL) and name not in state]:
            self.say(f"WARNING: {first_names(strange)} is not in this model, and is not read")
        return state


def resume_state(
    find: Find | None,
    target: LoadTarget,
    room: Path,
    *,
    memory: Path | None = None,
    disk_alone: bool = True,
) -> Checkpoint | None:
    """Load the newest state that is whole and verifies. Every rank calls it.

    `room` is the directory where this node saves, `memory` the one for states in memory. Raise
    CheckFailed if nodes have parts of checkpoints on disk and no state is whole.
    """
    began = time.perf_counter()
    found = search.all_checkpoints(
        find, memory, target.run, target.ranks, target.say, disk_alone=disk_alone
    )
    newest, begun = found.candidates[0].step if found.candidates else -1, False
    for checkpoint in found.unusable:
        if checkpoint.step > newest:
            target.say(f"WARNING: step {checkpoint.step} cannot be trusted: {checkpoint.problem}")
    for candidate in found.candidates:
        own = memory if candidate.in_memory and memory else room
        loading = Loading(candidate, target, own, shared=found.shared and not candidate.in_memory)
        if (loaded := loading.load(began)) is not None:
            return loaded
        begun = begun or loading.begun
    on_disk = [candidate for candidate in found.candidates if not candidate.in_memory]
    if lacking := [each for each in on_disk if not each.whole and not found.shared]:
        raise checkpoint_parts.no_checkpoint_error(lacking)
    if begun or (on_disk and not found.shared):
        raise CheckFailed(
            "none of its checkpoints verifies",
            "look at them with: orchestrator checkpoint verify; checkpoint.resume=never starts from"
            " the beginning",
        )
    return None


class Loading:
    """The load of one candidate. All ranks call the same methods in the same order."""

    def __init__(
        self, candidate: CheckpointCandidate, target: LoadTarget, room: Path, *, shared: bool
    ) -> None:
        self.candidate, self.target, self.ranks = candidate, target, target.ranks
        self.node = self.ranks.nodes[self.ranks.rank][0]
        self.members = nodes.ranks_of_nodes(self.ranks.nodes)
        # True if all ranks see one directory.
        self.shared = shared
        self.brought = checkpoint_store.partial_path(room, candidate.step, "brought")
        # Why this candidate is skipped.
        self.problem = ""
        # True once the target is overwritten.
        self.begun = False
        # Bytes that all nodes together received from other nodes.
        self.travelled = 0

    def load(self, began: float) -> Checkpoint | None:
        """Fill the target and return the checkpoint. If it is not whole, warn and return None."""
        try:
            loaded = self._loaded() if self.candidate.whole else None
        except CheckFailed as error:
            if not self.candidate.in_memory:
                raise
            self.target.say(f"WARNING: what is in memory is skipped: {error.what}")
            return None
        finally:
            if self.ranks.rank == self.ranks.neighbours[0]:
                shutil.rmtree(self.brought, ignore_errors=True)
        if loaded is None:
            problem = self.problem or f"{self.candidate.shortage()} on the nodes of this job"
            self.target.say(f"WARNING: {problem}; trying the one before it")
            return None
        self.target.auxiliary.restore(loaded.progress["stepper"])
        self._say_loaded(loaded, time.perf_counter() - began)
        return loaded

    def _loaded(self) -> Checkpoint | None:
        """Try to load it. Return None if files were damaged or could not be fetched."""
        if not self._bring({checkpoint_manifest.NAME, METADATA}):
            return None
        if self._is_damaged(map(self._damage_of, self._to_verify({METADATA}))):
            return None
        manifest = self._read(
            lambda path: checkpoint_manifest.parse_manifest(
                (path / checkpoint_manifest.NAME).read_bytes()
            )
        )
        metadata = self._read(reader.metadata_of)
        shown = "the state" if self.candidate.in_memory else str(self.path)
        state = self.target.state(manifest.progress, metadata, shown)
        needed = self._read(lambda _: self._needed(state, metadata))
        if not self._bring(needed) or not self._verified_and_read(state, needed):
            return None
        # The fetched files may be removed once all ranks have read them.
        gather_values(None)
        path = self.own or checkpoint_store.final_path(self.brought.parent, manifest.step)
        return Checkpoint(**vars(manifest), path=path)

    def _verified_and_read(self, state: Mapping[str, Tensor], needed: set[str]) -> bool:
        """Fill the state, while threads verify the files. Return False if one is damaged."""
        self.begun = True
        with ThreadPoolExecutor(THREADS) as pool:
            sums = pool.map(self._damage_of, self._to_verify(needed))
            try:
                self._read(lambda path: reader.load_into(state, path))
            except CheckFailed:
                # Damage explains why it cannot be read.
                if not self._is_damaged(sums):
                    raise
                return False
            return not self._is_damaged(sums)

    def _needed(self, state: Mapping[str, Tensor], metadata: Metadata) -> set[str]:
        names = reader.files_for(state, metadata)
        if strange := sorted(names - self.version[0].files.keys()):
            raise CheckFailed(f"its {METADATA} names {strange[0]}, which is none of its files")
        return names

    def _read(self, read: Callable[[Path], T]) -> T:
        """Call `read` with this node's directory. Raise CheckFailed on all ranks if one fails."""
        return run_together(
            lambda: read(self.path),
            said=lambda error: CheckFailed(f"{self.path} cannot be read: {first_cause(error)}"),
        )

    # -- the files of this node -------------------------------------------------------------------

    @property
    def version(self) -> Version:
        return self.candidate.version_for(self.node)

    @property
    def own(self) -> Path | None:
        """Return this node's own directory of the checkpoint or a part of it."""
        return next((Path(each.path) for each in self.version if each.node == self.node), None)

    @property
    def path(self) -> Path:
        """Return the directory to read: with fetched files and links, or this node's own."""
        own = self.own
        return self.brought if own is None or self.brought.exists() else own

    def _bring(self, names: set[str]) -> bool:
        """Fetch those of these files that this node lacks from other nodes.

        Return False if some could not be fetched.
        """
        needs: dict[int, set[str]] = {}
        for node, some in gather_values((self.node, names)):
            needs.setdefault(node, set()).update(some)
        deliveries = checkpoint_parts.plan_deliveries(self.candidate, needs)
        if not deliveries:
            return True
        between_ranks = [
            replace(
                each, source=self._member(each.source, at), target=self._member(each.target, at)
            )
            for at, each in enumerate(deliveries)
        ]
        to_here = (each.record.size for each in deliveries if each.target == self.node)
        if self._is_skipped(self._prepare(sum(to_here))):
            return False
        problems = nodes.carry_files(
            between_ranks,
            self.ranks.rank,
            host_group(),
            self._sent,
            lambda e: self.brought / e.name,
        )
        self.travelled += sum(delivery.record.size for delivery in deliveries)
        return not self._is_skipped(
            next(
                (
                    f"{self.shown} is not loaded: {each.name} does not come from"
                    f" {self.ranks.nodes[each.source][1]}: {problem}"
                    for each, problem in problems.items()
                ),
                "",
            )
        )

    def _member(self, node: int, number: int) -> int:
        members = self.members[node]
        return members[number % len(members)]

    def _sent(self, delivery: Delivery) -> Path:
        """Return this node's path of a file that the delivery sends."""
        version = self.candidate.version_for(self.ranks.nodes[delivery.target][0])
        return Path(next(each.path for each in version if each.node == self.node), delivery.name)

    def _to_verify(self, needed: set[str]) -> list[str]:
        """Return this rank's share of the needed files, divided among ranks that see the same."""
        sharing = range(self.ranks.world) if self.shared else self.ranks.neighbours
        names = set().union(
            *(some for rank, some in enumerate(gather_values(needed)) if rank in sharing)
        )
        here = sorted(
            name for name in names if self.node in checkpoint_parts.list_holders(self.version, name)
        )
        return here[sharing.index(self.ranks.rank) :: len(sharing)]

    def _damage_of(self, name: str) -> str:
        """Read every byte of a file. Return its damage, or an empty string."""
        problem = "is damaged: its sha256 is not the manifest's"
        try:
            digest = checkpoint_manifest.describe_file(Path(self.own or "", name))
            if digest == self.version[0].files[name]:
                return ""
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        return f"{name} {problem} ({self.ranks.nodes[self.ranks.rank][1]})"

    def _is_damaged(self, damaged: Iterable[str]) -> bool:
        words = "; ".join(filter(None, damaged))
        return self._is_skipped(words and f"{self.shown} cannot be trusted: {words}")

    def _is_skipped(self, problem: str) -> bool:
        """Return True on all ranks if one has a problem, which becomes that of the candidate."""
        self.problem = next(filter(None, gather_values(problem)), "")
        return bool(self.problem)

    def _prepare(self, size: int) -> str:
        """Create the directory for fetched files, with links to the own ones. Return a problem."""
        own, room = self.own, self.brought.parent
        if not size or self.ranks.rank != self.ranks.neighbours[0]:
            return ""
        try:
            self.brought.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(room).free
            if size > free:
                return (
                    f"{self.shown} is not loaded: {text.format_bytes(size)} from other nodes do not"
                    f" fit in {room} ({text.format_bytes(free)})"
                )
            for path in own.iterdir() if own is not None else ():
                (self.brought / path.name).unlink(missing_ok=True)
                (self.brought / path.name).symlink_to(path)
        except OSError as error:
            return f"{self.shown} is not loaded: {room}: {error.strerror}"
        return ""

    # -- messages ---------------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        place = " in memory" if self.candidate.in_memory else ""
        return f"step {self.candidate.step}{place}"

    def _say_loaded(self, loaded: Checkpoint, seconds: float) -> None:
        size = text.format_bytes(sum(record.size for record in loaded.files.values()))
        place = (
            f"memory ({self.brought.parent.parent})" if self.candidate.in_memory else loaded.path
        )
        comment = saved_by(loaded.progress, loaded.created)
        if self.travelled or not self.shared:
            comment += f"; {text.format_bytes(self.travelled)} came from other nodes"
        self.target.say(
            f"resuming after step {loaded.step}, from {place}: {size} verified and read"
            f" in {seconds:.2f} s; {comment}"
        )
