"""Remove what a plan selects, here and on the nodes, and note what became of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from orchestrator.head.prune import remove
from orchestrator.head.prune.plan import Entry, Plan
from orchestrator.head.prune.remove import InTheWay
from orchestrator.protocol.requests.follow import Remove
from orchestrator.records.checkpoint_store import shown

BATCH = 100  # experiments held at a time; each takes two file descriptors
NODES_SECONDS = 600.0  # a node's slow disk, a million files
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
        return {name: why for name, (action, why) in self.outcomes.items() if action == how}

    def go(self, seen: Callable[[int], None] = lambda _: None) -> None:
        """Remove all that goes; `seen` hears of bytes that are gone."""
        for hidden in self.plan.scan.hidden:
            self._delete(hidden, partial(remove.finish, self.root, hidden, seen))
        going = self.plan.going
        for start in range(0, len(going), BATCH):
            self._remove(going[start : start + BATCH], seen)

    def _remove(self, batch: Sequence[Entry], seen: Callable[[int], None]) -> None:
        held: dict[str, remove.Held] = {}
        try:
            for entry in batch:
                if obstacle := self.plan.measured[entry.name].obstacle:
                    self.outcomes[entry.name] = FAILED, obstacle
                    continue
                with self._noted(entry.name):
                    held[entry.name] = remove.hold(self.root, entry.name, entry.identity)
            if self.plan.on_nodes:
                self._clean_nodes([entry for entry in batch if entry.name in held])
            for name, lock in held.items():
                if name not in self.outcomes:
                    self._delete(name, partial(remove.take, self.root, lock, seen))
        finally:
            for lock in held.values():
                lock.release()

    def _delete(self, name: str, delete: Callable[[], list[str]]) -> None:
        with self._noted(name):
            problems = delete()
            more = f", and {len(problems) - 1} more" if problems[1:] else ""
            self.outcomes[name] = (
                (FAILED, f"some of it could not be deleted: {shown(problems[0])}{more}")
                if problems
                else (REMOVED, "")
            )

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

        shared = {entry.record.job for entry, why in self.plan.decided if why is not None}
        cleaned = [entry for entry in batch if entry.record.job not in shared]
        records = [entry.record for entry in cleaned]
        answers, silent = nodes.ask(Remove, records, self.ssh_config, NODES_SECONDS)
        self.freed_on_nodes += sum(answer.freed for answer in answers)
        problems = {(run.job, run.node): run.problem for answer in answers for run in answer.runs}
        for entry in cleaned:
            for node in entry.record.nodes:
                run = (entry.record.job, node.index)
                if run in silent:
                    self.unreached[node.name] = silent[run]
                if why := silent.get(run) or problems.get(run):
                    self.outcomes.setdefault(entry.name, (FAILED, f"on node {node.name}: {why}"))
