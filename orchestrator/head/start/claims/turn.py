"""Decide whose turn it is on the nodes that a launch waits for. Pure.

The queue is the launches themselves: each has an entry on each of its nodes. The order is the same
on all of them, by priority and then by time, so the first of all can always go ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.protocol.requests.claims import RUNNING, STARTING, Entry, clock


@dataclass(frozen=True)
class Machine:
    """One node of a launch that waits: what is held there, who waits, and what is free."""

    name: str
    entries: Sequence[Entry]
    free: int  # GPUs or slots,
    total: int  # of so many that the launch may have
    wants: int


def ahead(mine: Entry, entries: Iterable[Entry]) -> list[Entry]:
    """Return those who wait before this one, the first of all first."""
    waiting = [one for one in entries if one.in_line and one.rank < mine.rank]
    return sorted(waiting, key=lambda one: one.rank)


def blocked(mine: Entry, machine: Machine, now: float) -> str:
    """Say why a launch cannot start on a machine yet; nothing where it can."""
    if machine.free < machine.wants:
        return f"{machine.free} of {machine.wants} free"
    left = machine.free - machine.wants
    for one in ahead(mine, machine.entries):
        left -= one.wants
        if left < 0 and not fits_before(mine, one, machine, now):
            return f"{one.user}'s {one.job} waits before it"
    return ""


def holders(machine: Machine) -> str:
    """Say who has what a launch waits for; nothing where it is free, or nobody's."""
    some = [one for one in machine.entries if one.state in (STARTING, RUNNING) and one.keys]
    if machine.free >= machine.wants or not some:
        return ""
    who = ", ".join(f"{one.user}'s {one.job}{ends(one)}" for one in some)
    return f"; {who} {'has' if len(some) == 1 else 'have'} the rest"


def ends(entry: Entry) -> str:
    return f" (until {clock(entry.until)})" if entry.until else ""


def fits_before(mine: Entry, other: Entry, machine: Machine, now: float) -> bool:
    """Tell whether a launch would be over before another one, which waits longer, can start."""
    start = expected(other, machine, now)
    return bool(mine.seconds) and start is not None and now + mine.seconds <= start


def expected(entry: Entry, machine: Machine, now: float) -> float | None:
    """Return when a machine has enough for an entry, by what the others' owners say, if known."""
    free = machine.free
    if free >= entry.wants:
        return now
    ends = sorted((one.until or float("inf"), len(one.keys)) for one in machine.entries if one.keys)
    for until, count in ends:
        free += count
        if free >= entry.wants:
            return None if until == float("inf") else max(now, until)
    return None


def obstacles(mine: Entry, machines: Sequence[Machine], least: int, now: float) -> dict[str, str]:
    """Return nothing where enough machines are ready for a launch, else why others are not."""
    reasons = {machine.name: blocked(mine, machine, now) for machine in machines}
    ready = [name for name, reason in reasons.items() if not reason]
    return {} if len(ready) >= least else {name: why for name, why in reasons.items() if why}


def make_way(mine: Entry, machines: Sequence[Machine], least: int) -> dict[str, tuple[str, ...]]:
    """Return which jobs, by the ids of their entries, a launch asks to make way on each machine.

    Nobody is asked where that would not be enough, where others wait before this launch, or where
    a rule keeps it from starting.
    """
    if mine.why:
        return {}
    known = {machine.name: victims(mine, machine) for machine in machines}
    possible = sorted((len(ids), name) for name, ids in known.items() if ids is not None)
    if len(possible) < least:
        return {}
    return {name: ids for _, name in possible[:least] if (ids := known[name])}


def victims(mine: Entry, machine: Machine) -> tuple[str, ...] | None:
    """Return whose end would free enough of a machine: as few as possible; None where none would.

    The lowest priority goes first, and among equals the job that has run for the shortest time.
    """
    missing = mine_and_before(mine, machine) - machine.free
    some = [
        one
        for one in machine.entries
        if one.state == RUNNING and one.keys and one.resumes and one.priority < mine.priority
    ]
    chosen: list[Entry] = []
    for one in sorted(some, key=lambda entry: (entry.priority, -entry.since)):
        if missing > held(chosen):
            chosen.append(one)
    for one in list(chosen):  # those before it may be enough with those after it
        if held(chosen) - len(one.keys) >= missing:
            chosen.remove(one)
    return tuple(one.id for one in chosen) if held(chosen) >= missing else None


def held(entries: Sequence[Entry]) -> int:
    return sum(len(one.keys) for one in entries)


def mine_and_before(mine: Entry, machine: Machine) -> int:
    """Return what a launch wants of a machine, with those that have to start before it."""
    return machine.wants + sum(one.wants for one in ahead(mine, machine.entries))


def place(mine: Entry, machines: Sequence[Machine]) -> int:
    """Return how many wait before this launch on any of its nodes."""
    return len({one.id for machine in machines for one in ahead(mine, machine.entries)})
