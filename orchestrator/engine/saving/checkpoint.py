"""Saves checkpoints: sharded, atomic, checksummed, in the background.

Every rank writes its own shards through torch.distributed.checkpoint, so any other number of ranks
and any strategy can read a checkpoint. orchestrator.records.checkpoint_store writes the manifest
with the checksums and publishes the checkpoint by a rename; it needs no torch.

Nodes that share no disk each keep a complete checkpoint if they hold a whole copy of the
parameters. Otherwise each keeps its part, the manifest of all, and perhaps copies of other nodes'
parts (nodes.py). States in memory are checkpoints in a directory in memory (memory.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed, JobFailed
from orchestrator.common.files import AS_USUAL
from orchestrator.common.files import replace_file as write_file
from orchestrator.common.text import Say, plural
from orchestrator.config import schema
from orchestrator.engine.ranks.ranks import Ranks, gather_values, run_together, say_once
from orchestrator.engine.saving import nodes, ownership
from orchestrator.engine.saving.mirror import Mirror
from orchestrator.engine.saving.nodes import choose_writers
from orchestrator.engine.saving.ownership import TrainingRun, is_of_run
from orchestrator.engine.saving.reader import METADATA
from orchestrator.engine.saving.writer import (
    MOST_PARTS,
    StagedPlanner,
    Trouble,
    Writer,
    spread_items,
    trouble_of,
)
from orchestrator.engine.sharding.mesh import local_tensor
from orchestrator.protocol.events import UNSAVED
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint, FileRecord, Manifest

# Each save has a later time than the save before it, by at least this.
LATER_SECONDS = 1e-3
# Keeps a report below PIPE_BUF, so that the lines of ranks never mix.
LONGEST_REPORT = 400


class Checkpoints:
    """Saves into one directory. save() returns once the state is copied. A thread writes it."""

    # The object that saved last, by purpose.
    _writing: ClassVar[dict[str, Checkpoints]] = {}
    in_memory = False

    def __init__(
        self,
        config: schema.CheckpointConfig,
        directory: Path,
        ranks: Ranks,
        run: TrainingRun,
        say: Say,
        *,
        node_holds_all: bool,
    ) -> None:
        self.config, self.directory, self.ranks, self.say = config, directory, ranks, say
        self.token = gather_values(secrets.token_hex(4))[0]
        self.purpose = "memory" if self.in_memory else "disk"
        self.writers = choose_writers(
            directory, self.token, ranks, self.purpose, node_holds_all=node_holds_all
        )
        self.thread: threading.Thread | None = None
        # The thread of a save sets its step, bytes and seconds, or why it failed.
        self.this_save: tuple[int, int, float] | None = None
        # The same of all saves that were reported.
        self.saved: list[tuple[int, int, float]] = []
        # The number of saves in a row that have failed.
        self.in_a_row = 0
        # Why the last save failed, and the rank that could not write.
        self.reason = self.failed = ""
        self.culprit = -1
        # The newest step of this run on the disk.
        self.newest: int | None = None
        # Seconds for which the last save held up the training.
        self.stalled = 0.0
        self.staged: dict[str, Tensor] = {}
        # The step of the last save, also of a failed one, and why it has no copies.
        self.last_saved = -1
        self.unprotected = ""
        # The step that was resumed from: parts of checkpoints up to it are of use.
        self.known_whole = -1
        self.run = run
        self.mirror: Mirror | None = None
        self._open()
        apart = self.writers.apart
        if config.mirror and self.writers.publishes and (apart or ranks.rank == 0):
            self.mirror = Mirror(config.mirror, config.keep, functools.partial(is_of_run, run))
        if apart and not self.in_memory:
            say(
                "the nodes share no disk: each keeps its own part of every checkpoint, which is on"
                f" {plural(config.copies, 'node')} (checkpoint.copies)"
            )

    def _open(self) -> None:
        """Lock the directory, remove what a crash has left, and look for earlier checkpoints."""
        self.locks = self.writers.publishes and not ownership.is_locked(self.directory)
        if not all(gather_values(not self.locks or ownership.lock_directory(self.directory))):
            self.close()
            raise CheckFailed(
                f"{self.directory} is in use: another program saves its checkpoints there",
                "save_to= (checkpoint.directory) names another directory",
            )
        if self.locks:
            # Without the lock, another store of this process may be writing.
            checkpoint_store.remove_interrupted(self.directory, self.token)
        here = checkpoint_store.list_checkpoints(self.directory) if self.writers.publishes else []
        self.latest = max(gather_values(max((each.created for each in here), default=0.0)))
        own = (each for each in here if is_of_run(self.run, each.progress))
        self.newest = max((each.step for each in own if each.complete or each.part), default=None)

    def close(self) -> None:
        """Release the directory and the staged copy, after the mirror has copied the last save."""
        if self.mirror is not None:
            self.mirror.close()
        self.staged.clear()
        if self.locks:
            ownership.unlock_directory(self.directory)

    def leave(self) -> None:
        """Close on all ranks, and return when all of them have closed."""
        self.close()
        gather_values(None)

    # -- saving -------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        progress: Any,
        *,
        best: bool = False,
    ) -> None:
        """Copy the state to host memory and write it in a thread.

        Blocks until the save before has ended and the copy is made.
        """
        began = time.perf_counter()
        # The threads of one purpose share a process group, so they write one after another.
        for other in (self, Checkpoints._writing.get(self.purpose)):
            if other is not None:
                other.wait()
        Checkpoints._writing[self.purpose] = self
        values = {name: local_tensor(value) for name, value in state.items()}
        staged = self._stage(values) if self.config.asynchronous else values
        self.last_saved = step
        self.stalled = time.perf_counter() - began
        self.thread = threading.Thread(
            target=self._write, args=(step, dict(state), staged, progress, began, best), daemon=True
        )
        self.thread.start()
        if not self.config.asynchronous:
            self.thread.join()
            self.stalled = time.perf_counter() - began

    def _stage(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy to host memory that later saves reuse: a fresh page costs more than a copy."""
        for name, value in values.items():
            before = self.staged.get(name)
            if before is None or (before.shape, before.dtype) != (value.shape, value.dtype):
                pinned = value.device.type == "cuda"
                self.staged[name] = torch.empty_like(value, device="cpu", pin_memory=pinned)

        def copy(names: Iterable[str]) -> None:
            for name in names:
                self.staged[name].copy_(values[name], non_blocking=True)

        if torch.cuda.is_available():
            # The stream of this thread orders the copies after the step.
            copy(values)
            torch.cuda.current_stream().synchronize()
        else:
            with ThreadPoolExecutor(MOST_PARTS) as pool:
                list(pool.map(copy, spread_items(values, lambda name: values[name].nbytes)))
        return dict(self.staged)

    def poll(self) -> None:
        """Report a save that has ended."""
        if self.thread is not None and not self.thread.is_alive():
            self.wait()

    def wait(self) -> str:
        """Wait for the present save, report it, and return why it failed, or an empty string."""
        if self.thread is None:
            return ""
        self.thread.join()
        self.thread = None
        self.failed, self.reason = self.reason, ""
        problem = f"step {self.last_saved}: {self.failed}" if self.failed else ""
        self._report(problem)
        self.this_save, self.unprotected = None, ""
        return problem

    def _report(self, problem: str) -> None:
        if problem:
            self._warn(problem)
        elif self.this_save:
            step, size, seconds = self.this_save
            self.say(
                f"saved step {step}: {text.format_bytes(size)} in {seconds:.2f} s; training waited"
                f" {self.stalled * 1e3:,.0f} ms"
            )
            self.saved.append(self.this_save)
        if self.unprotected:
            self.say(f"WARNING: {self.unprotected}")

    def failed_everywhere(self) -> bool:
        """Wait for a save on all ranks. Return True on all of them if it failed on every rank."""
        self.wait()
        return all(gather_values(bool(self.failed)))

    def _warn(self, problem: str) -> None:
        """Warn that a step is not saved. One rank of each directory does so.

        The first failed save of several in a row is also reported to the supervisor, for job.json
        and notices.
        """
        if not self.writers.first:
            return
        newest = "nothing of this run" if self.newest is None else f"step {self.newest}"
        words = f"NOT SAVED: {problem}; {newest} is on the disk"
        say_once(f"WARNING: {words}; training continues, and the next save tries again")
        if self.in_a_row == 1:
            tell_supervisor(self.ranks, UNSAVED, self.culprit, self.last_saved, words)

    def finish(self) -> None:
        """Wait for a save that the user requested. Raise JobFailed on all ranks if it failed."""
        self.wait()
        culprit = max(gather_values(self.culprit if self.failed else -1))
        if culprit >= 0:
            raise self.failure(f"the checkpoint of step {self.last_saved}", culprit)

    def failure(self, what: str, culprit: int, fix: str = "") -> JobFailed:
        """Return the error of this rank. Only the culprit's error contains the reason."""
        missed = f"{what} could not be saved"
        if culprit == self.ranks.rank:
            return JobFailed(f"{missed}: {self.failed}", fix)
        return JobFailed(f"ended because of another rank: {missed} by rank {culprit}", fix)

    # -- in a thread, with a process group of its own ---------------------------------------------

    def _write(
        self,
        step: int,
        state: dict[str, Tensor],
        staged: Mapping[str, Tensor],
        progress: Any,
        began: float,
        best: bool,
    ) -> None:
        directory = checkpoint_store.partial_path(self.directory, step, self.token)
        group, apart = self.writers.group, self.writers.apart
        writer = Writer(directory, apart=apart)
        try:
            save(
                state,
                storage_writer=writer,
                planner=StagedPlanner(staged, lowest=apart or self.in_memory),
                process_group=group,
                no_dist=group is None,
            )
            files = self._publish(writer, step, progress, best=best)
            trouble = Trouble()
        # CheckpointException is a BaseException.
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            index = self.writers.members.index(self.ranks.rank)
            trouble = trouble_of(error, directory, index)
        try:
            troubles = gather_values(trouble, group)
        except RuntimeError:
            # The training ends because of that.
            self.reason = "another rank is gone"
            return
        if any(each.text for each in troubles):
            self.in_a_row += 1
            if self.writers.publishes:
                checkpoint_store.discard_partial(directory, step)
            self._blame(troubles)
            return
        self.in_a_row, self.newest = 0, step
        size = sum(record.size for record in files.values())
        self.this_save = step, size, time.perf_counter() - began

    def _blame(self, troubles: Sequence[Trouble]) -> None:
        """Set the culprit and the reason: the first rank with a fault of its own, if any."""
        first = min((t for t in troubles if t.text), key=lambda trouble: not trouble.own)
        self.culprit = self.writers.members[troubles.index(first)]
        node, host = self.ranks.nodes[self.culprit]
        who = f"rank {self.culprit} on node {node} ({host}): " if first.own else ""
        self.reason = f"{who}{first.text}"

    def _publish(
        self, writer: Writer, step: int, progress: Any, *, best: bool
    ) -> Mapping[str, FileRecord]:
        """Publish the files that all ranks have written, and prune."""
        ranks, group = self.ranks, self.writers.group
        final = checkpoint_store.final_path(self.directory, step)
        records = gather_values(writer.fs.records, group)
        # Sorted, because files that are written at the same time end in any order.
        files = dict(sorted(item for own in records for item in own.items()))
        hosts = {}
        if self.writers.apart:
            hosts = {n: ranks.nodes[nodes.writer_of(n)][1] for n in files if n != METADATA}
        # This clock may be behind the clock of the machine that saved last.
        self.latest = max(time.time(), self.latest + LATER_SECONDS)
        manifest = Manifest(step, self.latest, progress, ranks.world, files, self.token, hosts)
        names = list(files)
        if self.writers.apart:
            manifest = self._broadcast(writer.directory, manifest)
            own = set(ranks.neighbours)
            names = [n for n in files if n == METADATA or nodes.writer_of(n) in own]
        place = writer.directory, self.directory
        for action in (
            functools.partial(checkpoint_store.write_manifest, *place, manifest, names),
            functools.partial(checkpoint_store.put_in_place, *place, step),
        ):
            run_together(action, here=self.writers.publishes, among=group)
        if self.writers.apart:
            problem = nodes.keep_copies(final, files, ranks, group, self.config.copies)
            if problem:
                self.unprotected = f"step {step} is saved, but not all of its copies: {problem}"
        if self.mirror is not None:
            first = self.writers.first
            mirrored = [name for name in names if first or name != METADATA]
            self.mirror.copy(final, mirrored, whole=first)
        if self.writers.publishes:
            if best:
                checkpoint_store.mark_best(self.directory, step)
            self.prune(self.config.keep)
        return files

    def _broadcast(self, partial: Path, manifest: Manifest) -> Manifest:
        """Send the metadata, and the manifest of the first rank, to each node."""
        box: list[Any] = [None]
        if self.writers.first:
            box = [(manifest, (partial / METADATA).read_bytes())]
        dist.broadcast_object_list(box, 0, self.writers.group)
        manifest, metadata = box[0]
        if self.writers.publishes and not self.writers.first:
            write_file(partial / METADATA, metadata, AS_USUAL)
        return manifest

    def prune(self, keep: int) -> None:
        """Remove older checkpoints of this run. Those of other runs stay."""
        if self.writers.publishes:
            checkpoint_store.prune_checkpoints(self.directory, keep, self._is_ours, self._counts)

    def _is_ours(self, checkpoint: Checkpoint) -> bool:
        return is_of_run(self.run, checkpoint.progress)

    def _counts(self, checkpoint: Checkpoint) -> bool:
        """Return True if it is complete, as far as this node knows.

        A part counts only if this program saved it or it is not later than the resumed step: a
        resume skips incomplete later ones.
        """
        ours = checkpoint.save == self.token or checkpoint.step <= self.known_whole
        return checkpoint.complete or (checkpoint.part and ours)


def tell_supervisor(ranks: Ranks, cause: str, who: int, step: int, text: str) -> None:
    """Report a problem that the rank `who` causes to this node's supervisor, if there is one.

    The supervisor reports to the head that nothing is saved since this step.
    """
    run = os.environ.get("ORCHESTRATOR_RUN")
    if not run:
        return
    line = {
        "event": "slow",
        "rank": ranks.rank,
        "local": ranks.local,
        "time": time.time(),
        "cause": cause,
        "who": who,
        "node": ranks.nodes[who][0],
        "step": step,
        "text": text[:LONGEST_REPORT],
    }
    # The supervisor may be gone.
    with contextlib.suppress(OSError):
        pipe = os.open(Path(run, "reports"), os.O_WRONLY | os.O_NONBLOCK)
        with os.fdopen(pipe, "wb", buffering=0) as reports:
            reports.write(json.dumps(line).encode("ascii") + b"\n")
