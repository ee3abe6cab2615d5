"""Save: sharded, atomic, checksummed, in the background.

Every rank writes its own shards through torch.distributed.checkpoint, so a checkpoint can be read
by any other number of ranks and any strategy. What makes one trustworthy (manifest, checksums, the
rename that publishes it) is in orchestrator.records.checkpoint_store, which needs no torch.

Where nodes share no disk, every node keeps a complete checkpoint of its own, if it holds a whole
copy of the parameters.
"""

from __future__ import annotations

import functools
import math
import os
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
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from orchestrator import text
from orchestrator.config.schema import Config
from orchestrator.engine.ranks.mesh import Mesh, local_tensor, sharded_like, shards_again
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.engine.saving.ownership import Run, WriterLock, is_of
from orchestrator.errors import CheckFailed, JobFailed, OrchestratorError
from orchestrator.records import checkpoint_store

Say = Callable[[str], None]
PROBE = 1 << 16  # bytes
SEEN_WITHIN = 3.0  # seconds until a file of another node shows up on a shared disk (NFS caches)


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

    _saving: Checkpoints | None = None  # by whichever of them: threads share a process group

    def __init__(
        self, config: Config, directory: Path, mesh: Mesh, ranks: Ranks, run: Run, say: Say
    ) -> None:
        self.config, self.directory, self.ranks, self.say = config.checkpoint, directory, ranks, say
        self.run = run
        self.token = gather(secrets.token_hex(4))[0]
        self.writers = writers(directory, self.token, mesh, ranks, config)
        self.thread: threading.Thread | None = None
        self.written = self.problem = ""  # what to say of the last save, set by its thread
        self.failures = 0
        self.reason = self.failed = ""  # why the last save failed, if it did
        self.stalled = 0.0  # seconds for which it held up the training
        self.staged: dict[str, Tensor] = {}
        self.last_saved = -1  # or tried to
        self.trusted = math.inf  # the last step whose state may be published
        self.publishing = threading.Lock()
        self.lock = WriterLock(directory)
        owner = self.lock.acquire(run) if self.writers.first else ""
        if other := next((owner for owner in gather(owner) if owner), ""):
            self.close()
            raise CheckFailed(
                f"{directory} is in use: {other} saves its checkpoints there",
                "save_to= (checkpoint.directory) names another directory; if the machine of that"
                f" program is gone, remove {self.lock.path}",
            )
        if self.lock.first:  # else another one may be writing
            checkpoint_store.clean(directory, self.token)

    def close(self) -> None:
        """Let others save into the directory, and give back the memory of the copy."""
        self.staged.clear()
        self.lock.release()

    def leave(self) -> None:
        """Close on all ranks: then none of them finds a trace of the others."""
        self.close()
        gather(None)

    # -- saving -------------------------------------------------------------------------------

    def save(
        self, step: int, model: nn.Module, stepper: Steps, progress: Any, *, best: bool = False
    ) -> None:
        """Copy the state aside and write it; the one before has to be done first."""
        began = time.perf_counter()
        if Checkpoints._saving is not None:
            Checkpoints._saving.wait()
        Checkpoints._saving = self
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
        self.failed = self.reason if self.problem else ""
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

    def _stage(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy to host memory that is kept between saves: a fresh page costs more than a copy."""
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
        """Write in a thread of its own, with a process group of its own."""
        directory = checkpoint_store.partial(self.directory, step, self.token)
        try:
            save(
                state,
                storage_writer=FileSystemWriter(directory, single_file_per_rank=True),
                planner=self._planner(),
                process_group=self.writers.group,
            )
            files = self._digests(directory)
            size = 0
            if self.writers.first:
                self._publish(directory, step, progress, files, best=best)
                self.prune(self.config.keep)
                size = sum(record.size for record in files.values())
            failed = ""
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (a BaseException)
            failed = disk_problem(directory) or first_cause(error)
            size = 0
        failed = next((problem for problem in gather(failed, self.writers.group) if problem), "")
        if failed:
            self.failures += 1
            if self.writers.first:
                checkpoint_store.discard(directory, step)
            self.reason = failed
            self.problem = (
                f"NOT SAVED: the checkpoint of step {step} failed: {failed}; training goes on, and"
                " the checkpoints before it are as they were"
            )
        elif size:
            seconds = time.perf_counter() - began
            self.written = f"saved step {step}: {text.size(size)} in {seconds:.2f} s"

    def _publish(
        self,
        partial: Path,
        step: int,
        progress: Any,
        files: Mapping[str, checkpoint_store.FileRecord],
        *,
        best: bool,
    ) -> None:
        with self.publishing:
            if step > self.trusted:
                raise CheckFailed("the copies of the weights are not equal any more")
            checkpoint_store.publish(
                partial, self.directory, step, progress, self.ranks.world, files
            )
            if best:
                checkpoint_store.mark_best(self.directory, step)

    def distrust(self, after: int) -> None:
        """Set aside what this run saved after a step, and publish nothing of what it still writes:
        checksums only say that files are as they were written."""
        with self.publishing:
            self.trusted = after
            if self.writers.first:
                checkpoint_store.set_aside(
                    self.directory, after, lambda checkpoint: is_of(self.run, checkpoint.progress)
                )

    def _planner(self) -> DefaultSavePlanner:
        """Plan a save like the one before it: only changes travel to the first rank and back.

        torch keeps plans by the name of the planner's class; after a failure, of which some ranks
        may have plans that others have not, they begin anew.
        """
        kind = type(f"Plans{self.token}{self.failures}", (DefaultSavePlanner,), {})
        planner: DefaultSavePlanner = kind(enable_plan_caching=True)
        return planner

    def prune(self, keep: int) -> None:
        """Remove older checkpoints of this run; those of other runs stay."""
        if not self.writers.first:
            return
        checkpoint_store.prune(
            self.directory, keep, lambda checkpoint: is_of(self.run, checkpoint.progress)
        )

    def _digests(self, directory: Path) -> dict[str, checkpoint_store.FileRecord]:
        """Give the first rank the digests of the files that each rank wrote; the others nothing."""
        own = sorted(path.name for path in directory.glob(f"__{self.writers.index}_*"))
        if self.writers.first:
            own.append(".metadata")
        records: Any = None
        try:
            records = {name: checkpoint_store.digest(directory / name) for name in own}
        except OSError as error:
            records = str(error)
        digests: dict[str, checkpoint_store.FileRecord] = {}
        everyone: list[Any] | None = [None] * self.writers.size if self.writers.first else None
        dist.gather_object(records, everyone, self.writers.leader, self.writers.group)
        for part in everyone or ():
            if isinstance(part, str):
                raise OSError(part)
            digests.update(part)
        return digests


def writers(directory: Path, token: str, mesh: Mesh, ranks: Ranks, config: Config) -> Writers:
    """Return all ranks, where they see the same directory; else those of each node."""
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
            f"checkpoints cannot be written: {next(text for text in problems if text)}",
            "set checkpoint.directory to a place that every rank can write to",
        )
    members = ranks.neighbours
    looked = [seen(directory / f".seen_{token}_{rank}") for rank in (0, members[0])]
    shared, together = everywhere(looked)
    (directory / mine).unlink()
    if shared:
        group = writing_group(dist.group.WORLD, tuple(range(ranks.world)))
        return Writers(group, ranks.rank == 0, ranks.rank, ranks.world)
    return writers_of_a_node(mesh, ranks, together, config)


def everywhere(answers: list[bool]) -> list[bool]:
    """Tell for each question whether all ranks answer yes."""
    least = torch.tensor(answers).int()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=host_group())
    return [bool(answer) for answer in least.tolist()]


@functools.cache
def writing_group(
    world: dist.ProcessGroup | None, members: tuple[int, ...]
) -> dist.ProcessGroup | None:
    """Make a group for the threads that write, once: each has threads and files of its own."""
    group: dist.ProcessGroup | None = dist.new_group(list(members), backend="gloo")
    return group


def writers_of_a_node(mesh: Mesh, ranks: Ranks, together: bool, config: Config) -> Writers:
    """Let each node write all by itself; its ranks have to see one directory (`together`)."""
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
    own_group = None
    for node in nodes:
        group = writing_group(dist.group.WORLD, tuple(ranks.of_node(node)))
        if node == ranks.nodes[ranks.rank][0]:
            own_group = group
    members = ranks.neighbours
    first = ranks.rank == members[0]
    return Writers(own_group, first, members.index(ranks.rank), len(members), members[0])


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
    """Return all that is saved, by name: the very tensors that train."""
    shards_again(model)
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
    kept = model.state_dict().keys()  # of the buffers, those that somebody wants to be kept
    state.update({f"model.{name}": b for name, b in model.named_buffers() if name in kept})
    for name, value in stepper.state():
        state[f"optim.{name}"] = value
    return state


def disk_problem(directory: Path) -> str:
    """Say what the disk says when it is written to: torch's writer hides it in a number."""
    probe = directory / f".probe_{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, bytes(PROBE))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{error.strerror or error} ({directory.parent})"
    return ""


def first_cause(error: BaseException) -> str:
    """Say in a line why the first rank failed, without the traces of the others."""
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    lines = str(error).strip().splitlines()
    if isinstance(error, OrchestratorError):
        return error.what
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
