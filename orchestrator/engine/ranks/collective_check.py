"""Debug mode of the collectives: explain a mistake that would otherwise be a deadlock.

Before each collective every rank tells the others, through the process group's store, what it is
about to enter and on which line. None enters before all have announced the same.
ORCHESTRATOR_DEBUG_COLLECTIVES=1 or debug() switches it on.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import linecache
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from orchestrator.common.errors import JobFailed, UsageError

SWITCH = "ORCHESTRATOR_DEBUG_COLLECTIVES"
LIMIT_SECONDS = 60.0  # that a rank may arrive later than the others
POLL, LONGEST_POLL = 0.01, 0.16
OURS = str(Path(__file__).parents[2]) + os.sep
ROLE = re.compile(r"\b(is_master_\w+|\w*rank\w*)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Entry:
    """The collective that one rank is about to enter."""

    what: str  # the collective, with the arguments that have to match on all ranks
    location: str  # the user's own line
    guard: str  # the `if` about ranks around it

    def __str__(self) -> str:
        return f"{self.what} at {self.location}"


class _Room:
    """The side channel of one process group."""

    def __init__(self, store: distributed_c10d.Store) -> None:
        self.base, self.number = store, 0
        self.store = distributed_c10d.PrefixStore("orchestrator/roll_call", store)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        atexit.register(self.leave)

    def leave(self) -> None:
        with contextlib.suppress(Exception):  # the store's own process may be gone already
            self.store.set(f"left/{self.rank}", "1")
            self.store.add("left", 1)

    def call(self, entry: Entry, seconds: float) -> None:
        self.number += 1
        keys = {rank: f"{self.number}/{rank}" for rank in range(self.world)}
        self.store.set(keys[self.rank], json.dumps(asdict(entry)))
        self._forget_older()
        if self.store.compare_set(f"{self.number}/what", "", entry.what).decode() != entry.what:
            self.store.add(f"{self.number}/different", 1)
        self._wait(keys, seconds)
        if self.store.check([f"{self.number}/verdict"]):  # the others have given up on this rank
            raise JobFailed(*json.loads(self.store.get(f"{self.number}/verdict")))
        if self.store.add(f"{self.number}/different", 0):
            raise JobFailed(*different(self._entries(keys)))

    def _wait(self, keys: Mapping[int, str], seconds: float) -> None:
        """Wait for the others, by counters: what all have said is read only if it is needed."""
        arrived = self.store.add(f"{self.number}/arrived", 1)
        deadline, pause = time.monotonic() + seconds, POLL
        while arrived < self.world:
            late = time.monotonic() > deadline
            if late or self.store.add("left", 0):
                entries = self._entries(keys)
                gone = [r for r in keys if r not in entries and self.store.check([f"left/{r}"])]
                if gone or late:
                    self._fail(*self._absent(entries, gone, seconds))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)
            arrived = self.store.add(f"{self.number}/arrived", 0)

    def _forget_older(self) -> None:
        """Forget all but the previous one, which shows where an absent rank was last."""
        if self.number > 2:
            self.store.delete_key(f"{self.number - 2}/{self.rank}")
            for counter in ("arrived", "different", "what") if self.rank == 0 else ():
                self.store.delete_key(f"{self.number - 2}/{counter}")

    def _entries(self, keys: Mapping[int, str]) -> dict[int, Entry]:
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: Entry(**json.loads(self.store.get(key))) for rank, key in there.items()}

    def _absent(
        self, entries: Mapping[int, Entry], gone: Sequence[int], seconds: float
    ) -> tuple[str, str]:
        lines = lines_of(entries)
        before = {rank: f"{self.number - 1}/{rank}" for rank in range(self.world)}
        last = self._entries(before)
        for rank in range(self.world):
            if rank in gone:
                lines.append(f"  rank {rank}: has ended its program without it")
            elif rank not in entries:
                where = f"the last it entered was {last[rank]}" if rank in last else "nor any other"
                lines.append(f"  rank {rank}: has not entered it; {where}")
        began = "only some ranks entered a collective, and would have waited forever:"
        if not gone:
            began = f"after {seconds:g} s only some ranks have entered a collective:"
        fix = f"{fix_of(entries)}; if they are only slower, set {SWITCH} to more seconds"
        return "\n".join([began, *lines, *guards_of(entries)]), fix

    def _fail(self, what: str, fix: str) -> None:
        self.store.set(f"{self.number}/verdict", json.dumps([what, fix]))
        raise JobFailed(what, fix)


_limit: float | None = None
_room: _Room | None = None


def debug(limit: float | None = LIMIT_SECONDS) -> None:
    """Switch the check on, with the seconds that ranks may be apart, or off, with None."""
    global _limit  # noqa: PLW0603  (one switch per process)
    if limit is not None and not limit > 0:
        raise UsageError(f"the limit of the debug mode is {limit}; it must be above 0")
    _limit = limit or 0.0


def limit() -> float:
    """Return the limit in seconds, or 0 if the check is off."""
    if _limit is not None:
        return _limit
    text = os.environ.get(SWITCH, "").strip().lower()
    if text in ("", "0", "off", "false", "no"):
        return 0.0
    if text in ("1", "on", "true", "yes"):
        return LIMIT_SECONDS
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{SWITCH} is {text!r}; it can be 1, 0, or a number of seconds") from None


def check(what: str) -> None:
    """Check before a collective of all ranks; an error has the same text on all of them."""
    if seconds := limit():
        room().call(Entry(what, *here()), seconds)


def room() -> _Room:
    global _room  # noqa: PLW0603  (one process group per process)
    store = distributed_c10d._get_default_store()
    if _room is None or _room.base is not store:
        _room = _Room(store)
    return _room


# -- the text ---------------------------------------------------------------------------------


def different(entries: Mapping[int, Entry]) -> tuple[str, str]:
    names = {entry.what.partition(" ")[0] for entry in entries.values()}
    began = "the ranks are in different collectives, and would have waited forever:"
    if len(names) == 1:
        began = f"the ranks call {names.pop()} with arguments that do not match:"
    return "\n".join([began, *lines_of(entries), *guards_of(entries)]), fix_of(entries)


def lines_of(entries: Mapping[int, Entry]) -> list[str]:
    """Describe each entry in a line; ranks with the same one share it."""
    same: dict[str, list[int]] = {}
    for rank, entry in entries.items():
        same.setdefault(str(entry), []).append(rank)
    return [
        f"  rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {entry}"
        for entry, ranks in same.items()
    ]


def guards_of(entries: Mapping[int, Entry]) -> list[str]:
    return list(dict.fromkeys(entry.guard for entry in entries.values() if entry.guard))


def fix_of(entries: Mapping[int, Entry]) -> str:
    if guards_of(entries):
        return "every rank has to enter every collective: move it out of the if"
    return "every rank has to enter the same collectives, in the same order, with tensors that fit"


def here() -> tuple[str, str]:
    """Return the user's own line, and the `if` about ranks around it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    file, line, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    where = "" if name == "<module>" else f" in {name}"
    location = f"{Path(file).name}:{line}{where}"
    code = linecache.getline(file, line).strip()
    return f"{location}: {code}" if code else location, guard(linecache.getlines(file), line, file)


def guard(source: Sequence[str], line: int, file: str) -> str:
    try:
        tree = ast.parse("".join(source))
    except SyntaxError:  # a notebook's magic commands, for example
        return ""
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not ROLE.search(test := ast.unparse(node.test)):
            continue
        if node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            where = f"{Path(file).name}:{line}"
            return f"  {where} is under `if {test}:` in line {node.lineno}"
    return ""
