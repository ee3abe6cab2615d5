"""Remove what a plan selects, here and on the nodes: each whole or gone, however it is cut short.

All is done by names in directories that are held open, so that no symbolic link is ever followed,
whoever puts one where. What an interruption left hidden, the next prune deletes.

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
from orchestrator.head.prune.plan import Entry, InTheWay, Plan, lock_of_head, pinned
from orchestrator.protocol.requests.follow import Remove
from orchestrator.protocol.timing import FILES_ANSWER_SECONDS
from orchestrator.records.checkpoint_store import shown

BATCH = 100  # experiments held at a time; each takes two file descriptors
REMOVED, KEPT, FAILED = "removed", "kept", "failed"


@dataclass
class Removal:
    """One walk through a plan: name -> what became of it, and why."""

    root: int
    plan: Plan
    ssh_config: Path | None = None
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)  # node -> why
    freed_on_nodes: int = 0

    @property
    def freed(self) -> int:
        return sum(self.plan.measured[name].size for name in self.ended(REMOVED))

    def ended(self, how: str) -> dict[str, str]:
        """Return those that ended so, each with the reason."""
        return {name: reason for name, (action, reason) in self.outcomes.items() if action == how}

    def go(self, seen: Callable[[int], None] = lambda _: None) -> None:
        """Remove all that goes; `seen` hears of bytes that are gone."""
        for hidden in self.plan.scan.hidden:
            with self._noted(hidden):
                self._deleted(hidden, finish(self.root, hidden, seen))
        going = self.plan.going
        for start in range(0, len(going), BATCH):
            with contextlib.ExitStack() as stack:
                self._remove(going[start : start + BATCH], stack, seen)

    def _remove(
        self, batch: Sequence[Entry], stack: contextlib.ExitStack, seen: Callable[[int], None]
    ) -> None:
        held: dict[str, Held] = {}
        for entry in batch:
            with self._noted(entry.name):
                if obstacle := self.plan.measured[entry.name].obstacle:
                    self.outcomes[entry.name] = FAILED, obstacle
                else:
                    held[entry.name] = hold(self.root, entry.name, entry.identity)
                    stack.callback(held[entry.name].release)
        if self.plan.on_nodes:
            self._clean_nodes([entry for entry in batch if entry.name in held])
        for name in [name for name in held if name not in self.outcomes]:
            with self._noted(name):
                self._deleted(name, take(self.root, held[name], seen))

    def _deleted(self, name: str, problems: Sequence[str]) -> None:
        self.outcomes[name] = REMOVED, ""
        if problems:
            more = f", and {len(problems) - 1} more" if problems[1:] else ""
            reason = f"some of it could not be deleted: {shown(problems[0])}{more}"
            self.outcomes[name] = FAILED, reason

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """Note why an experiment could not be removed."""
        try:
            yield
        except InTheWay as why:
            self.outcomes[name] = KEPT, str(why)
        except FileNotFoundError:
            self.outcomes[name] = KEPT, "another process has removed it"
        except OSError as error:
            self.outcomes[name] = FAILED, f"{error.strerror}, in {shown(self.plan.directory)}"

    def _clean_nodes(self, batch: Sequence[Entry]) -> None:
        """Remove what these jobs left on their nodes, before their records are removed.

        Only the record says which nodes a job ran on: it stays until all of them were cleaned, or
        the rest would never be found again. A job whose record was also copied to an experiment
        that stays keeps its files on the nodes.
        """
        from orchestrator.head.prune import nodes

        shared = {entry.record.job for entry, reason in self.plan.decided if reason is not None}
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
                if reason := silent.get(run) or problems.get(run):
                    self.outcomes.setdefault(entry.name, (FAILED, f"on node {node.name}: {reason}"))


# -- one of them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """An experiment that no head and no other prune can take up meanwhile."""

    name: str
    directory: int
    lock: BinaryIO  # of its head; closed before its files are deleted
    all: contextlib.ExitStack

    def release(self) -> None:
        self.all.close()


def hold(root: int, name: str, identity: tuple[int, int]) -> Held:
    """Lock an experiment against everybody else; InTheWay and OSError say why that failed."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(files.opened(name, root))
        _lock_of_prune(directory)
        lock = stack.enter_context(lock_of_head(directory, os.O_CREAT))
        status = os.fstat(directory)
        if (status.st_dev, status.st_ino) != identity:
            raise InTheWay("it was replaced a moment ago")
        if pinned(directory):
            raise InTheWay("it has just been pinned")
        return Held(name, directory, lock, stack.pop_all())


def _lock_of_prune(directory: int) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InTheWay("another prune is removing it") from None
    except OSError:
        pass  # NFS locks no directories; two prunes then both delete it, which does no harm


def hide(root: int, held: Held) -> str:
    """Give an experiment a hidden name until it is deleted, and return that name."""
    hidden = files.hidden_name(held.name)
    files.hide(held.name, hidden, root)
    now = os.stat(hidden, dir_fd=root, follow_symlinks=False)
    same = os.path.samestat(now, os.fstat(held.directory))
    if not same or pinned(held.directory):
        os.rename(hidden, held.name, src_dir_fd=root, dst_dir_fd=root)
        raise InTheWay("it has just been pinned" if same else "something else has taken its name")
    return hidden


def take(root: int, held: Held, seen: Callable[[int], None]) -> list[str]:
    """Hide an experiment and delete it; return what could not be deleted.

    A network disk keeps a deleted file that is open, and with it the directory: as the lock is
    found by its name, which is hidden by now, nobody can miss it.
    """
    hidden = hide(root, held)
    held.lock.close()
    return files.delete(hidden, seen, root)


def finish(root: int, hidden: str, seen: Callable[[int], None]) -> list[str]:
    """Delete what an interrupted prune left; return what could not be deleted."""
    with contextlib.suppress(FileNotFoundError), files.opened(hidden, root) as directory:
        _lock_of_prune(directory)
        return files.delete(hidden, seen, root)
    return []
