"""Removes experiments, here and on the nodes: each whole or gone, however it is cut short.

All is done by names in directories that are held open, so that no symbolic link is ever followed.
What an interruption left hidden, the next prune deletes.

    multinode_20260101_000000                  an experiment
    .multinode_20260101_000000.gone-0123abcd   being deleted
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from orchestrator.common import files
from orchestrator.head.prune.entries import (
    FAILED,
    KEPT,
    REMOVED,
    SELECTED,
    Entry,
    InTheWay,
    Removable,
    lock_of_head,
    mounted,
    pinned,
)
from orchestrator.protocol.requests.follow import Remove
from orchestrator.protocol.timing import FILES_ANSWER_SECONDS
from orchestrator.records.checkpoint_store import shown

BATCH = 100  # experiments held at a time; each takes two file descriptors


@dataclass
class Removal:
    """The removal of what was selected in a directory of experiments."""

    root: int
    directory: Path
    ssh_config: Path | None = None
    on_nodes: bool = False
    unreached: dict[str, str] = field(default_factory=dict)  # node -> why
    freed_on_nodes: int = 0
    seen: Callable[[int], None] = lambda _: None  # hears of bytes that are gone

    def go(self, entries: Sequence[Entry], leftovers: Sequence[Removable] = ()) -> None:
        """Remove all that was selected, and what interrupted removals left."""
        for one in leftovers:
            with self.noted(one), files.opened(one.name, self.root) as directory:
                lock_of_prune(directory)
                self.delete(one, one.name)
        going = [entry for entry in entries if entry.action == SELECTED]
        shared = {entry.record.job for entry in entries if entry.action == KEPT}
        for start in range(0, len(going), BATCH):
            with contextlib.ExitStack() as stack:
                batch = going[start : start + BATCH]
                held: dict[str, Held] = {}
                for entry in batch:
                    with self.noted(entry):
                        held[entry.name] = stack.enter_context(self.hold(entry))
                if self.on_nodes:
                    self.clean_nodes([one for one in batch if one.name in held], shared)
                for entry in batch:
                    with self.noted(entry):
                        if entry.action == SELECTED:
                            self.take(entry, held[entry.name])

    @contextlib.contextmanager
    def noted(self, one: Removable) -> Iterator[None]:
        """Note why a directory could not be removed."""
        try:
            yield
        except InTheWay as why:
            one.stays(str(why))
        except FileNotFoundError:
            one.stays("another process has removed it")
        except OSError as error:
            one.action = FAILED
            one.reason = f"{error.strerror}, in {shown(self.directory)}"

    def clean_nodes(self, batch: Sequence[Entry], shared: set[str]) -> None:
        """Remove what these jobs left on their nodes, before their records are removed.

        Only the record says which nodes a job ran on: it stays until all of them were cleaned, or
        the rest would never be found again. A job whose record was also copied to an experiment
        that stays keeps its files on the nodes.
        """
        from orchestrator.head.prune import nodes

        cleaned = [entry for entry in batch if entry.record.job not in shared]
        records = [entry.record for entry in cleaned]
        answers, silent = nodes.ask(Remove, records, self.ssh_config, FILES_ANSWER_SECONDS)
        self.freed_on_nodes += sum(answer.freed for answer in answers)
        problems = {(run.job, run.node): run.problem for answer in answers for run in answer.runs}
        for entry in cleaned:
            for node in entry.record.nodes:
                run = (entry.record.job, node.index)
                if run in silent:
                    self.unreached[node.name] = silent[run]
                reason = silent.get(run) or problems.get(run)
                if reason and entry.action == SELECTED:
                    entry.action, entry.reason = FAILED, f"on node {node.name}: {reason}"

    @contextlib.contextmanager
    def hold(self, entry: Entry) -> Iterator[Held]:
        """Lock an experiment against heads and other prunes, and look at it once more."""
        with files.opened(entry.name, self.root) as directory:
            lock_of_prune(directory)
            with lock_of_head(directory, os.O_CREAT) as lock:
                status = os.fstat(directory)
                if (status.st_dev, status.st_ino) != entry.identity:
                    raise InTheWay("it was replaced a moment ago")
                if pinned(directory):
                    raise InTheWay("it has just been pinned")
                if obstacle := mounted(self.directory / entry.name):
                    raise InTheWay(obstacle)
                yield Held(directory, lock)

    def take(self, entry: Entry, held: Held) -> None:
        """Hide an experiment and delete it.

        A network disk keeps a deleted file that is open, and with it the directory: the lock goes
        first, as it is found by a name that is hidden by now.
        """
        hidden = files.hidden_name(entry.name)
        files.hide(entry.name, hidden, self.root)
        now = os.stat(hidden, dir_fd=self.root, follow_symlinks=False)
        same = os.path.samestat(now, os.fstat(held.directory))
        if not same or pinned(held.directory):
            os.rename(hidden, entry.name, src_dir_fd=self.root, dst_dir_fd=self.root)
            raise InTheWay(
                "it has just been pinned" if same else "something else has taken its name"
            )
        held.lock.close()
        self.delete(entry, hidden)

    def delete(self, one: Removable, name: str) -> None:
        problems = files.delete(name, self.seen, self.root)
        one.action = FAILED if problems else REMOVED
        if problems:
            more = f", and {len(problems) - 1} more" if problems[1:] else ""
            one.reason = f"some of it could not be deleted: {shown(problems[0])}{more}"


@dataclass(frozen=True)
class Held:
    """An experiment that no head and no other prune can take up."""

    directory: int
    lock: BinaryIO  # of its head; closed before its files are deleted


def lock_of_prune(directory: int) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InTheWay("another prune is removing it") from None
    except OSError:
        pass  # NFS locks no directories; two prunes then both delete it, which does no harm
