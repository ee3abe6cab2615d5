"""Saving and resuming: sharded, atomic, checksummed, in the background.

Every rank writes its own shards through torch.distributed.checkpoint, so a checkpoint can be read
by any other number of ranks and any strategy. What makes one trustworthy (manifest, checksums, the
rename that publishes it) is in orchestrator.records.checkpoint_store, which needs no torch.

Where nodes share no disk, every node keeps a complete checkpoint of its own, if it holds a whole
copy of the parameters.
"""

from __future__ import annotations

import glob
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from orchestrator.config.schema import Config
from orchestrator.engine.ranks.mesh import Mesh, local_tensor, sharded_like, shards_again
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.errors import CheckFailed, JobFailed, OrchestratorError, UsageError
from orchestrator.records import checkpoint_store

Say = Callable[[str], None]
SEEN_WITHIN = 3.0  # seconds until a file of another node shows up on a shared disk (NFS caches)

# Takes a checkpoint's progress; raises CheckFailed if this program cannot use it.
Accept = Callable[[Any], None]


class Steps(Protocol):
    """The optimizer and its numbers, which are saved with the model."""

    def state(self) -> Iterable[tuple[str, Tensor]]: ...

    def prime(self, progress: Mapping[str, Any]) -> None: ...

    def restore(self, progress: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Writers:
    """The ranks that together write one complete checkpoint: all, or those of one node."""

    group: dist.ProcessGroup | None
    first: bool  # this rank names, publishes and prunes
    index: int
    size: int
    leader: int = 0  # the first of them, among all ranks


class Checkpoints:
    """One per run. save() returns when the state is copied; files are written meanwhile."""

    def __init__(self, config: Config, directory: Path, mesh: Mesh, ranks: Ranks, say: Say) -> None:
        self.config, self.directory, self.ranks, self.say = config.checkpoint, directory, ranks, say
        self.token = gather(secrets.token_hex(4))[0]
        self.writers = writers(directory, self.token, mesh, ranks, config)
        self.thread: threading.Thread | None = None
        self.written = self.problem = ""  # what to say of the last save, set by its thread
        self.failures = 0
        self.stalled = 0.0  # seconds for which it held up the training
        self.staged: dict[str, Tensor] = {}
        self.last_saved = -1
        if self.writers.first:
            checkpoint_store.clean(directory, self.token)

    # -- saving -------------------------------------------------------------------------------

    def save(
        self, step: int, model: nn.Module, stepper: Steps, progress: Any, *, best: bool = False
    ) -> None:
        """Copy the state aside and write it; the one before has to be done first."""
        began = time.perf_counter()
        self.wait()
        state = state_of(model, stepper)
        if self.config.asynchronous:
            state = self._stage(state)
        self.last_saved = step
        self.thread = threading.Thread(
            target=self._write, args=(step, state, progress, began, best), daemon=True
        )
        self.thread.start()
        if not self.config.asynchronous:
            self.thread.join()
        self.stalled = time.perf_counter() - began

    def poll(self) -> None:
        """Say what became of a save, once it is known."""
        if self.thread is not None and not self.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        if self.problem:
            self.say(f"WARNING: {self.problem}")
        elif self.written:
            self.say(f"{self.written}; training waited {self.stalled * 1e3:,.0f} ms")
        self.problem = self.written = ""

    def finish(self) -> None:
        """Wait for a save that was asked for by hand, and raise what went wrong."""
        if self.thread is not None:
            self.thread.join()
        problem = self.problem
        self.wait()
        if problem:
            raise JobFailed(problem)

    def close(self) -> None:
        """Give back the group of ranks, with its threads and sockets, and the copy of the state."""
        self.wait()
        self.staged.clear()
        if self.writers.group is not None:
            dist.destroy_process_group(self.writers.group)

    def _stage(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Into host memory that is kept from save to save: a fresh page costs more than a copy."""
        for name, value in state.items():
            own = local_tensor(value)
            if name not in self.staged:
                pinned = own.device.type == "cuda"
                self.staged[name] = torch.empty_like(own, device="cpu", pin_memory=pinned)
            self.staged[name].copy_(own, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return {name: sharded_like(value, self.staged[name]) for name, value in state.items()}

    def _write(
        self, step: int, state: dict[str, Tensor], progress: Any, began: float, best: bool
    ) -> None:
        """In a thread of its own, with a process group of its own."""
        place = checkpoint_store.partial(self.directory, step, self.token)
        try:
            save(
                state,
                storage_writer=FileSystemWriter(place, single_file_per_rank=True),
                planner=self._planner(),
                process_group=self.writers.group,
            )
            files = self._digests(place)
            size = 0
            if self.writers.first:
                checkpoint_store.publish(
                    place, self.directory, step, progress, self.ranks.world, files
                )
                if best:
                    checkpoint_store.mark_best(self.directory, step)
                checkpoint_store.prune(self.directory, self.config.keep)
                size = sum(record.size for record in files.values())
            failed = ""
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (a BaseException)
            failed = first_cause(error)
            size = 0
        failed = next((one for one in gather(failed, self.writers.group) if one), "")
        if failed:
            self.failures += 1
            if self.writers.first:
                checkpoint_store.clean(self.directory, "")
            self.problem = (
                f"NOT SAVED: the checkpoint of step {step} failed: {failed}; training goes on, and"
                " the checkpoints before it are as they were"
            )
        elif size:
            seconds = time.perf_counter() - began
            self.written = f"saved step {step}: {size / 1e6:,.1f} MB in {seconds:.2f} s"

    def _planner(self) -> DefaultSavePlanner:
        """Plan a save like the one before it: only changes travel to the first rank and back.

        torch keeps plans by the name of the planner's class; after a failure, of which some ranks
        may have plans that others have not, they begin anew.
        """
        kind = type(f"Plans{self.token}{self.failures}", (DefaultSavePlanner,), {})
        planner: DefaultSavePlanner = kind(enable_plan_caching=True)
        return planner

    def _digests(self, place: Path) -> dict[str, checkpoint_store.FileRecord]:
        """Give the first rank the digests of the files that each rank wrote; the others nothing."""
        own = sorted(path.name for path in place.glob(f"__{self.writers.index}_*"))
        if self.writers.first:
            own.append(".metadata")
        records: Any = None
        try:
            records = {name: checkpoint_store.digest(place / name) for name in own}
        except OSError as error:
            records = str(error)
        found: dict[str, checkpoint_store.FileRecord] = {}
        everyone: list[Any] | None = [None] * self.writers.size if self.writers.first else None
        dist.gather_object(records, everyone, self.writers.leader, self.writers.group)
        for one in everyone or ():
            if isinstance(one, str):
                raise OSError(one)
            found.update(one)
        return found

    # -- resuming -----------------------------------------------------------------------------

    def resume(
        self,
        model: nn.Module,
        stepper: Steps,
        accept: Accept = lambda progress: None,
    ) -> checkpoint_store.Checkpoint | None:
        """Read the newest checkpoint that verifies into model and optimizer."""
        if self.config.resume == "never":
            return None
        began = time.perf_counter()
        for found in self._candidates(accept):
            problems = self._verify(found)
            if problems:
                self.say(
                    f"WARNING: step {found.step} cannot be trusted: {'; '.join(problems[:3])};"
                    " trying the one before it"
                )
                continue
            accept(found.progress)
            stepper.prime(found.progress["stepper"])
            state = state_of(model, stepper)
            try:
                reader = FileSystemReader(found.path)
                load(state, storage_reader=reader, process_group=self.writers.group)
            except (Exception, CheckpointException) as error:  # noqa: BLE001 (as torch has it)
                raise CheckFailed(
                    f"{found.path} does not fit this model and optimizer: {first_cause(error)}",
                    "resume with the model.* and optimizer.name that it was saved with",
                ) from None
            stepper.restore(found.progress["stepper"])
            seconds = time.perf_counter() - began
            how = f"{found.size / 1e6:,.1f} MB verified and read in {seconds:.2f} s"
            self.say(f"resuming after step {found.step}, from {found.path}: {how}")
            return found
        if self.config.resume != "auto":
            raise CheckFailed(
                f"checkpoint.resume={self.config.resume}: none of its checkpoints verifies",
                "look at them with: orchestrator checkpoint verify",
            )
        self.say(f"nothing to resume from in {self.directory}: starting anew")
        return None

    def _candidates(self, accept: Accept) -> list[checkpoint_store.Checkpoint]:
        """Newest first, and only those that every writer group has."""
        found: list[checkpoint_store.Checkpoint] = []
        problem = ""
        if self.writers.first:
            try:
                found = self._look(accept)
            except OrchestratorError as error:
                problem = str(error)
        told = gather((self.writers.first, [one.step for one in found], problem, found))
        for first, _, trouble, _ in told:
            if first and trouble:
                raise CheckFailed(trouble)
        common = set.intersection(*(set(steps) for first, steps, _, _ in told if first))
        # Without a shared disk, the paths are those of this node's own first rank.
        leader = dist.get_global_rank(self.writers.group, 0) if self.writers.group else 0
        return [one for one in told[leader][3] if one.step in common]

    def _look(self, accept: Accept) -> list[checkpoint_store.Checkpoint]:
        wanted = self.config.resume
        if wanted != "auto":
            found = checkpoint_store.resolve(wanted)
        else:
            found = checkpoint_store.every(self.directory)
            if self.config.directory is None and not found:
                found = earlier_runs(self.directory, accept)
        # What was saved last comes first: steps of an older run may be higher.
        return sorted(found, key=lambda checkpoint: checkpoint.created, reverse=True)

    def _verify(self, found: checkpoint_store.Checkpoint) -> list[str]:
        """All ranks share the reading; all come to the same answer."""
        mine = sorted(found.files)[self.writers.index :: self.writers.size]
        told = gather(
            checkpoint_store.verify(found, mine) or ([found.problem] if found.problem else [])
        )
        return list(dict.fromkeys(problem for problems in told for problem in problems))


def refuse_unreadable(path: Path) -> None:
    """Look before anything is made: a wrong path must not leave an empty directory behind."""
    problem: tuple[str, str] | None = None
    if path.is_file():
        problem = (
            f"{path} is a file, and a checkpoint of several ranks is a directory",
            "weights from torch.save: model.load_state_dict(torch.load(FILE)) before the Trainer",
        )
    else:
        try:
            checkpoint_store.resolve(str(path))
        except OrchestratorError as error:
            problem = (error.what, error.fix)
    for rank, other in enumerate(gather(problem)):
        if other is not None:
            raise UsageError(f"rank {rank}: {other[0]}" if problem is None else other[0], other[1])


def refuse_later(path: Path, step: int) -> None:
    """Saved beside later ones, new checkpoints would be the oldest, and the first to be removed."""
    later = max((found.step for found in checkpoint_store.every(path)), default=0)
    highest = max(gather(later))
    if highest > step:
        raise UsageError(
            f"{path} holds step {highest} of another run, and this one is at step {step}",
            "resume=True (checkpoint.resume=auto) goes on from it; save_to="
            " (checkpoint.directory) names another directory",
        )


def earlier_runs(directory: Path, accept: Accept) -> list[checkpoint_store.Checkpoint]:
    """Find the newest experiment of the same name, next to this one, that has a checkpoint.

    One that another kind of program wrote does not count: programs share the name by default.
    A node that shares no disk has its own: runs/<experiment>-<id>/<node>/experiment.
    """
    run, inner = directory.parent.parent, Path("outputs/checkpoints")
    if run.name == "experiment":
        run, inner = run.parent.parent, Path("*/experiment/outputs/checkpoints")
    named = re.fullmatch(r"(.+)_\d{8}_\d{6}(-\w+)?", run.name)
    if named is None:
        return []
    pattern = f"{glob.escape(named[1])}_[0-9]*_[0-9]*"
    for other in sorted(run.parent.glob(pattern), reverse=True):
        for place in other.glob(str(inner)) if other != run else ():
            found = checkpoint_store.every(place)
            if found and all_accepted(found, accept):
                return found
    return []


def all_accepted(found: Iterable[checkpoint_store.Checkpoint], accept: Accept) -> bool:
    """Tell whether this kind of program wrote them; one whose manifest is damaged may pass."""
    try:
        for checkpoint in found:
            if checkpoint.progress is not None:
                accept(checkpoint.progress)
    except CheckFailed:
        return False
    return True


def writers(directory: Path, token: str, mesh: Mesh, ranks: Ranks, config: Config) -> Writers:
    """All ranks, where they see the same directory; else those of each node."""
    mine = f".seen_{token}_{ranks.rank}"
    problem = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / mine).touch()
    except OSError as error:
        problem = f"{directory}: {error.strerror}"
    problems = gather(problem)
    if any(problems):
        raise CheckFailed(
            f"checkpoints cannot be written: {next(one for one in problems if one)}",
            "set checkpoint.directory to a place that every rank can write to",
        )
    members = ranks.of_node(ranks.nodes[ranks.rank][0])
    looked = [seen(directory / f".seen_{token}_{rank}") for rank in (0, members[0])]
    shared, together = everywhere(looked)
    (directory / mine).unlink()
    if shared:
        group = dist.new_group(backend="gloo")
        return Writers(group, ranks.rank == 0, ranks.rank, ranks.world)
    return writers_of_a_node(mesh, ranks, together, config)


def everywhere(answers: list[bool]) -> list[bool]:
    """Tell for each question whether all ranks answer yes."""
    least = torch.tensor(answers).int()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=host_group())
    return [bool(answer) for answer in least.tolist()]


def writers_of_a_node(mesh: Mesh, ranks: Ranks, together: bool, config: Config) -> Writers:
    """Each node writes all by itself; its ranks have to see one directory (`together`)."""
    nodes = sorted({node for node, _ in ranks.nodes})
    whole = mesh.mesh is None or (
        mesh.copies > 1 and all(len(ranks.of_node(n)) % mesh.mesh.size(-1) == 0 for n in nodes)
    )
    if not (whole and together):
        raise CheckFailed(
            "the nodes do not share the directory of the checkpoints, and no node holds all"
            f" parameters by itself ({config.fsdp.sharding_strategy})",
            "set checkpoint.directory to a shared disk, or fsdp.sharding_strategy to hybrid_shard",
        )
    made = None
    for node in nodes:
        group = dist.new_group(ranks.of_node(node), backend="gloo")
        if node == ranks.nodes[ranks.rank][0]:
            made = group
    members = ranks.of_node(ranks.nodes[ranks.rank][0])
    first = ranks.rank == members[0]
    return Writers(made, first, members.index(ranks.rank), len(members), members[0])


def seen(mark: Path) -> bool:
    """Return whether another rank's file shows up here; another node's may take a moment."""
    deadline = time.monotonic() + SEEN_WITHIN
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# -- the state ------------------------------------------------------------------------------------


def state_of(model: nn.Module, stepper: Steps) -> dict[str, Tensor]:
    """All that is saved, by name: the very tensors that train."""
    shards_again(model)
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
    kept = model.state_dict().keys()  # of the buffers, those that somebody wants to be kept
    state.update({f"model.{name}": b for name, b in model.named_buffers() if name in kept})
    for name, value in stepper.state():
        state[f"optim.{name}"] = value
    return state


def first_cause(error: BaseException) -> str:
    """One line: what the first rank that failed said, without the traces of the others."""
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    words = str(error).strip().splitlines()
    if isinstance(error, OrchestratorError):
        return error.what
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
