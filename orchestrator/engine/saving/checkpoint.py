"""Save: sharded, atomic, checksummed, in the background.

Every rank writes its own shards through torch.distributed.checkpoint, so a checkpoint can be read
by any other number of ranks and any strategy. What makes one trustworthy (manifest, checksums, the
rename that publishes it) is in orchestrator.records.checkpoint_store, which needs no torch.

Where nodes share no disk, every node keeps a complete checkpoint of its own, if it holds a whole
copy of the parameters; else its part of one (orchestrator.engine.saving.parts).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed, JobFailed, OrchestratorError, UsageError
from orchestrator.common.text import Say
from orchestrator.config.schema import Config
from orchestrator.engine.ranks import plain_names, supervisor
from orchestrator.engine.ranks.agreement import Copies
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group, say_once
from orchestrator.engine.saving import carry, parts
from orchestrator.engine.saving.ownership import Run, WriterLock, is_of, later_than
from orchestrator.engine.sharding.mesh import Mesh, local_tensor, plain_of, sharded_like
from orchestrator.engine.sharding.refusals import WHOLE
from orchestrator.engine.sharding.used_parts import reshard
from orchestrator.protocol.reports import UNSAVED
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint, FileRecord

MODEL = "model."  # before the names of parameters and buffers in a checkpoint
PROBE_BYTES = 1 << 16
SEEN_WITHIN_SECONDS = 3.0  # a file of another node shows up on a shared disk (NFS caches)


@dataclass(frozen=True)
class Writers:
    """The ranks that together write one complete checkpoint: all, or those of one node."""

    group: dist.ProcessGroup | None
    first: bool  # this rank writes the manifest
    publishes: bool  # and this one publishes and prunes: one for each directory
    members: tuple[int, ...]
    apart: bool = False  # onto the disks of several nodes


@dataclass(frozen=True)
class Trouble:
    """Why a rank could not save: by its own fault, or because another one could not."""

    text: str = ""
    own: bool = False


class Checkpoints:
    """One per run. save() returns when the state is copied; files are written meanwhile."""

    _saving: Checkpoints | None = None  # by whichever of them: threads share a process group

    def __init__(
        self, config: Config, directory: Path, mesh: Mesh, ranks: Ranks, run: Run, say: Say
    ) -> None:
        self.config, self.directory, self.ranks, self.say = config.checkpoint, directory, ranks, say
        self.token = gather(secrets.token_hex(4))[0]
        self.writers = writers(directory, self.token, mesh, ranks)
        self.thread: threading.Thread | None = None
        self.written = self.problem = ""  # what to say of the last save, set by its thread
        self.this_save = (0, 0, 0.0)  # the step, bytes and seconds of the last one
        self.saved: list[tuple[int, int, float]] = []  # the same of each whose end was said
        self.failures = self.in_a_row = 0
        self.reason = self.failed = ""  # why the last save failed, if it did
        self.culprit = -1  # the rank that could not write then
        self.newest: int | None = None  # the last step of this run that is on the disk
        self.in_memory: Callable[[], int | None] = lambda: None  # and that is in the nodes' memory
        self.stalled = 0.0  # seconds for which it held up the training
        self.staged: dict[str, Tensor] = {}
        self.constant: set[str] | None = None  # of those: what has not changed since the first save
        self.copies = Copies()
        self.before: list[parts.Before] = []  # the last two
        self.last_saved = -1  # or tried to
        self.trusted = math.inf  # the last step whose state may be published
        self.publishing = threading.Lock()  # a state is not distrusted in the midst of that
        self.unprotected = ""  # why there are no copies of the last one
        self.known_whole = -1  # the step that was resumed from: parts up to there are of use
        self.lock = WriterLock(directory)
        owner = self.lock.acquire(run) if self.writers.publishes else ""
        if other := next((owner for owner in gather(owner) if owner), ""):
            self.close()
            raise CheckFailed(
                f"{directory} is in use: {other} saves its checkpoints there",
                "save_to= (checkpoint.directory) names another directory; if the machine of that"
                f" program is gone, remove {self.lock.path}",
            )
        if self.lock.first:  # else another one may be writing
            checkpoint_store.clean(directory, self.token)
        here = checkpoint_store.every(directory) if self.writers.publishes else []
        latest = max(
            gather(max((checkpoint.generation for checkpoint in here), default=run.generation))
        )
        self.run = replace(run, generation=later_than(max(latest, run.generation)))
        own = (each for each in here if is_of(self.run, each.progress))
        self.newest = max((each.step for each in own if each.complete or each.part), default=None)
        self._say_what_is_kept()

    def _say_what_is_kept(self) -> None:
        nodes, copies = len({node for node, _ in self.ranks.nodes}), self.config.copies
        if self.writers.apart:
            self.say(parts.picture(nodes, copies))
        elif copies > 1:
            reason = "every node keeps a whole checkpoint by itself"
            if nodes == 1:
                reason = "there is no other node"
            elif len(self.writers.members) == self.ranks.world:
                reason = f"the nodes share {self.directory}"
            self.say(f"checkpoint.copies={copies} adds nothing: {reason}")

    def close(self) -> None:
        """Let others save into the directory, and give back the memory of the copy."""
        self.staged.clear()
        self.constant, self.copies, self.before = None, Copies(), []
        self.lock.release()

    def leave(self) -> None:
        """Close on all ranks: then none of them finds a trace of the others."""
        self.close()
        gather(None)

    # -- saving -------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: nn.Module,
        auxiliary: Mapping[str, Tensor],
        progress: Any,
        *,
        best: bool = False,
    ) -> None:
        """Copy the state aside and write it; the one before has to be done first."""
        began = time.perf_counter()
        if Checkpoints._saving is not None:
            Checkpoints._saving.wait()
        Checkpoints._saving = self
        state = state_of(model, auxiliary)
        if self.config.asynchronous:
            state = self._stage(state, frozen_of(model))
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

    def wait(self) -> str:
        """Wait for a save, say what became of it, and return what went wrong."""
        if self.thread is None:
            return ""
        self.thread.join()
        self.thread = None
        problem = self.problem
        self.failed = self.reason if problem else ""
        if problem:
            self._warn(problem)
        elif self.written:
            self.say(f"{self.written}; training waited {self.stalled * 1e3:,.0f} ms")
            self.saved.append(self.this_save)
        if self.unprotected:
            self.say(f"WARNING: {self.unprotected}")
        self.problem = self.written = self.unprotected = ""
        return problem

    def failed_everywhere(self) -> bool:
        """Wait for a save on all ranks; tell whether no disk has it whole. All get one answer."""
        self.wait()
        return all(gather(bool(self.failed)))

    def _warn(self, problem: str) -> None:
        """Say what was not saved and what that costs: one rank for each directory.

        The supervisor hears of the first save of several: job.json and notices have it, too.
        """
        if not self.writers.first:
            return
        words = f"NOT SAVED: {problem}; {self._at_stake()}"
        say_once(f"WARNING: {words}; training continues, and the next save tries again")
        if self.in_a_row == 1:
            supervisor.tell(self.ranks, UNSAVED, self.culprit, self.last_saved, words)

    def _at_stake(self) -> str:
        """Say what is left if the job ends now. A job is not ended for a full disk, not even where
        a spare stands by: as long as it runs nothing is lost, and there may be room again. Where
        the last save fails, too, the attempt does, and its verdict names the node to replace."""
        newest, memory = self.newest, self.in_memory()
        disk = "nothing of this run is on a disk" if newest is None else ""
        if len(self.writers.members) < self.ranks.world:
            return (
                f"{disk or f'the newest on this node is of step {newest}'}; others keep their own"
            )
        if memory is not None:
            rest = disk or f"the disk has step {newest}"
            return f"a restart continues from step {memory}, in the nodes' memory; {rest}"
        if disk:
            return f"{disk}, and a restart starts from the beginning"
        return f"a restart goes back to step {newest}"

    def finish(self) -> None:
        """Wait for a save that was asked for by hand, and raise what went wrong: on all ranks."""
        self.wait()
        culprit = max(gather(self.culprit if self.failed else -1))
        if culprit >= 0:
            raise self.failure(f"the checkpoint of step {self.last_saved}", culprit)

    def failure(self, what: str, culprit: int, fix: str = "") -> JobFailed:
        """Return the error of a rank. The one that could not write says why, and is the cause."""
        missed = f"{what} could not be saved"
        if culprit == self.ranks.rank:
            return JobFailed(f"{missed}: {self.failed}", fix)
        return JobFailed(f"ended because of another rank: {missed} by rank {culprit}", fix)

    def _stage(self, state: dict[str, Tensor], frozen: set[str]) -> dict[str, Tensor]:
        """Copy to host memory that is kept between saves: a fresh page costs more than a copy.

        What was frozen at the first save stays there for as long as it is to the bit what it was.
        """
        values = {name: local_tensor(value) for name, value in state.items()}
        unchanged: set[str] = set()
        if self.constant is not None:
            there = {name: values[name] for name in self.constant & values.keys()}
            unchanged = self.constant = self.copies.equal(there)
        for name, value in values.items():
            if name in unchanged:
                continue
            before = self.staged.get(name)
            if before is None or (before.shape, before.dtype) != (value.shape, value.dtype):
                pinned = value.device.type == "cuda"
                self.staged[name] = torch.empty_like(value, device="cpu", pin_memory=pinned)
            self.staged[name].copy_(value, non_blocking=True)
        if self.constant is None:
            self.constant = frozen & values.keys()
            kept = {name: self.staged[name] for name in self.constant}
            self.copies.note({name: values[name] for name in kept}, kept)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return {name: sharded_like(value, self.staged[name]) for name, value in state.items()}

    def _write(
        self, step: int, state: dict[str, Tensor], progress: Any, began: float, best: bool
    ) -> None:
        """Write in a thread of its own, with a process group of its own."""
        directory = checkpoint_store.partial(self.directory, step, self.token)
        writer = parts.Writer(
            *(directory, frozenset(self.constant or ()), self._linkable.changeless),
            apart=self.writers.apart,
        )
        try:
            save(
                state,
                storage_writer=writer,
                planner=self._planner(),
                process_group=self.writers.group,
            )
            before, size = self._publish(writer, step, progress, best=best)
            trouble = Trouble()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (a BaseException)
            trouble = trouble_of(
                error, directory, self.writers.members.index(self.ranks.rank), state
            )
            before, size = parts.Before(), (0, 0)
        troubles = gather(trouble, self.writers.group)
        if any(each.text for each in troubles):
            self.failures, self.in_a_row = self.failures + 1, self.in_a_row + 1
            if self.writers.publishes:
                checkpoint_store.discard(directory, step)
            self._blame(troubles)
            self.problem = f"step {step}: {self.reason}"
            return
        self.in_a_row, self.newest = 0, step
        self.before = [*self.before, before][-2:]
        if size[0]:
            seconds = time.perf_counter() - began
            same = f", {text.size(size[1])} of it linked" if size[1] else ""
            self.this_save = step, size[0], seconds
            self.written = f"saved step {step}: {text.size(size[0])} in {seconds:.2f} s{same}"

    def _blame(self, troubles: Sequence[Trouble]) -> None:
        """Name the first rank whose own fault it is, if any tells so."""
        first = min((t for t in troubles if t.text), key=lambda trouble: not trouble.own)
        self.culprit = self.writers.members[troubles.index(first)]
        node, host = self.ranks.nodes[self.culprit]
        who = f"rank {self.culprit} on node {node} ({host}): " if first.own else ""
        self.reason = f"{who}{first.text}"

    def _publish(
        self, writer: parts.Writer, step: int, progress: Any, *, best: bool
    ) -> tuple[parts.Before, tuple[int, int]]:
        """Publish what all have written, and prune.

        Returns what later ones may link; the first rank also hears how many bytes it was, and how
        many of them are the same as in the one that was linked.
        """
        writers, directory = self.writers, writer.directory
        written, files = self._digests(writer, checkpoint_store.final(self.directory, step))
        copied: Mapping[str, parts.Written] = {}
        linkable = self._linkable
        if writers.apart:
            place = parts.Place(
                directory, self.directory, self.ranks, writers.group, writers.publishes
            )
            manifest = parts.publish(place, step, progress, files, self.token, self._trusting)
            copies = self.config.copies
            copied, problem = parts.keep_copies(place, manifest, copies, linkable.copies)
            if problem:
                self.unprotected = f"step {step} is saved, but not all of its copies: {problem}"
        elif writers.first:
            with self._trusting(step):
                checkpoint_store.publish(
                    directory, self.directory, step, progress, self.ranks.world, files, self.token
                )
        if writers.publishes:
            if best:
                with self._trusting(step):
                    checkpoint_store.mark_best(self.directory, step)
            self.prune(self.config.keep)
        same = sum(record.size for name, record in linkable.files.items()
                   if parts.CONSTANT in name and files.get(name) == record)  # fmt: skip
        size = sum(record.size for record in files.values())
        return parts.Before(written, copied, files), (size, same)

    @property
    def _linkable(self) -> parts.Before:
        """Return the checkpoint before the last one, if two are kept: so no two that follow each
        other share a file, and where one is damaged, the one before it is not."""
        if max(self.config.keep, 1) > 1:
            return self.before[0] if len(self.before) == 2 else parts.Before()
        return self.before[-1] if self.before else parts.Before()

    @contextlib.contextmanager
    def _trusting(self, step: int) -> Iterator[None]:
        """Let nobody distrust the state of a step while it is published."""
        with self.publishing:
            if step > self.trusted:
                raise CheckFailed("the copies of the weights are not equal any more")
            yield

    def distrust(self, after: int) -> None:
        """Set aside what this run saved after a step, and publish nothing of what it still writes:
        checksums only say that files are as they were written."""
        with self.publishing:
            self.trusted = after
            if self.writers.publishes:
                checkpoint_store.set_aside(
                    self.directory, after, lambda checkpoint: is_of(self.run, checkpoint.progress)
                )

    def _planner(self) -> DefaultSavePlanner:
        """Plan a save like the one before it: only changes travel to the first rank and back.

        torch keeps plans by the name of the planner's class; after a failure, of which some ranks
        may have plans that others have not, they begin anew.
        """
        kind = type(f"Plans{self.token}{self.failures}", (DefaultSavePlanner,), {})
        planner: DefaultSavePlanner = kind(
            enable_plan_caching=True, dedup_save_to_lowest_rank=self.writers.apart
        )
        return planner

    def prune(self, keep: int) -> None:
        """Remove older checkpoints of this run; those of other runs stay."""
        if not self.writers.publishes:
            return
        checkpoint_store.prune(
            self.directory,
            keep,
            lambda checkpoint: is_of(self.run, checkpoint.progress),
            self._counts,
        )

    def _counts(self, checkpoint: Checkpoint) -> bool:
        """Tell whether it is whole, as far as this node knows: of later parts, which a resume has
        passed over, it does not know that."""
        ours = checkpoint.save == self.token or checkpoint.step <= self.known_whole
        return checkpoint.complete or (checkpoint.part and ours)

    def _digests(
        self, writer: parts.Writer, final: Path
    ) -> tuple[parts.Written | None, Mapping[str, FileRecord]]:
        """Return what later checkpoints may link of this rank's files, and the digests of all.

        Once all have answered, the first may publish: then no file has its name here any more.
        """
        index = self.writers.members.index(self.ranks.rank)
        names = sorted(path.name for path in writer.directory.glob(f"__{index}_*"))
        if self.writers.first:
            names.append(".metadata")
        records: Mapping[str, FileRecord] = {}
        written, problem = None, ""
        try:
            records = writer.digests(names)
            written = writer.written(final, records)
        except OSError as error:
            problem = str(error)
        answers = gather((problem, records), self.writers.group)
        if problem := next((problem for problem, _ in answers if problem), ""):
            raise OSError(problem)
        return written, {name: record for _, some in answers for name, record in some.items()}


def writers(directory: Path, token: str, mesh: Mesh, ranks: Ranks) -> Writers:
    """Return all ranks, where they see one directory or no node holds all; else those of a node."""
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
    marks = [seen(directory / f".seen_{token}_{rank}") for rank in (0, members[0])]
    shared, together = everywhere(marks)
    (directory / mine).unlink()
    if not shared and not together:
        raise CheckFailed(
            "the ranks of one node do not share the directory of the checkpoints",
            "set checkpoint.directory to a place that all of them see",
        )
    apart = not shared and not holds_all(mesh, ranks)
    sets = [list(range(ranks.world))]
    if not shared and not apart:
        sets = [members for _, members in sorted(carry.of_nodes(ranks.nodes).items())]
    groups = [writing_group(dist.group.WORLD, tuple(each)) for each in sets]
    group, all_of_it = next(
        (group, each) for group, each in zip(groups, sets, strict=True) if ranks.rank in each
    )
    return Writers(
        group,
        first=ranks.rank == all_of_it[0],
        publishes=ranks.rank == (members if apart else all_of_it)[0],
        members=tuple(all_of_it),
        apart=apart,
    )


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


def holds_all(mesh: Mesh, ranks: Ranks) -> bool:
    """Tell whether each node has all parameters by itself."""
    counts = [len(members) for members in carry.of_nodes(ranks.nodes).values()]
    return mesh.mesh is None or (
        mesh.copies > 1 and all(count % mesh.mesh.size(-1) == 0 for count in counts)
    )


def seen(mark: Path) -> bool:
    """Return whether another rank's file shows up here; another node's may take a moment."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# -- the state ------------------------------------------------------------------------------------


def state_of(model: nn.Module, auxiliary: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all that is saved, by name: the very tensors that train, and what is beside them."""
    reshard(model)
    state: dict[str, Tensor] = {}
    for name, parameter in plain_names.parameters(model):
        state.update(made_of(f"model.{name}", parameter))
    kept = plain_names.state_dict(model).keys()  # of the buffers, those that are to be kept
    for name, buffer in plain_names.buffers(model):
        if name in kept:
            state.update(made_of(f"model.{name}", buffer))
    state.update(auxiliary)
    return state


def made_of(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Give a tensor of the model, or those that it is made of."""
    plain = plain_of(tensor)
    if isinstance(plain, DTensor) and is_traceable_wrapper_subclass(plain._local_tensor):
        raise UsageError(
            f"no checkpoint can hold {name.removeprefix('model.')}, a"
            f" {type(plain._local_tensor).__name__} in shards",
            f"{WHOLE}; or train without save_to=, save_every= and --max-restarts",
        )
    for inner, value in plain_names.made_of(name, plain):
        yield inner, value.detach()


def frozen_of(model: nn.Module) -> set[str]:
    """Name what nothing trains: frozen weights, and buffers of integers, as quantised weights are.

    Nobody relies on it: what changes all the same is saved as it is.
    """
    names = {name for name, weight in plain_names.parameters(model) if not weight.requires_grad}
    kept = plain_names.state_dict(model).keys()
    buffers = {
        name
        for name, buffer in plain_names.buffers(model)
        if name in kept and buffer.dim() and not (buffer.is_floating_point() or buffer.is_complex())
    }
    tensors = {**dict(plain_names.parameters(model)), **dict(plain_names.buffers(model))}
    found = [made_of(f"model.{n}", tensors[n]) for n in names | buffers]
    return {name for each in found for name, _ in each}


def trouble_of(
    error: BaseException, directory: Path, index: int, state: Mapping[str, Tensor]
) -> Trouble:
    """Say why a save failed, and whether it was this rank, the one with this index, that failed."""
    if problem := disk_problem(directory):
        need = sum(value.numel() * value.element_size() for value in state.values())
        return Trouble(f"{problem}; a checkpoint takes {text.size(need)} in all", own=True)
    own = isinstance(error, CheckpointException) and index in error.failures
    return Trouble(first_cause(error), own)


def disk_problem(directory: Path) -> str:
    """Say what the disk says when it is written to: torch's writer hides it in a number.

    What this save has written is removed with it, so that much is free, too.
    """
    probe = directory / f".probe_{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, bytes(PROBE_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        problem = f"{error.strerror or error} ({directory.parent})"
        with contextlib.suppress(OSError):
            disk = os.statvfs(directory)
            written = sum(512 * path.stat().st_blocks for path in directory.iterdir())
            free, whole = disk.f_bavail * disk.f_frsize + written, disk.f_blocks * disk.f_frsize
            problem += f", {text.size(free)} of {text.size(whole)} free"
            problem += ", no room for another file" if disk.f_files and not disk.f_favail else ""
        return problem
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
