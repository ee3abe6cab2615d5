"""Decide whose turn it is on the nodes that a launch waits for. Pure.

The queue is the launches themselves: each has an entry on each of its nodes. The order is the time
of the entry, then its id. It is the same on all nodes, so the first of all can always go ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.protocol.requests.claims import RUNNING, STARTING, WAITING, Entry


@dataclass(frozen=True)
class Machine:
    """One node of a launch that waits: what is held there, who waits, and what is free."""

    name: str
    entries: Sequence[Entry]  # of others
    free: int  # GPUs or slots,
    total: int  # of so many that the launch may have
    wants: int


def ahead(mine: Entry, entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries that wait before this one, the first of all first."""
    waiting = [one for one in entries if one.state == WAITING and one.rank < mine.rank]
    return sorted(waiting, key=lambda one: one.rank)


def blocked(mine: Entry, machine: Machine) -> str:
    """Say why a launch cannot start on a machine yet; nothing if it can.

    It goes before others only where it leaves enough for all of them.
    """
    left = machine.free - machine.wants
    if left < 0:
        return f"{machine.free} of {machine.wants} free"
    for one in ahead(mine, machine.entries):
        left -= one.wants
        if left < 0:
            return f"{one.user}'s {one.job} waits before it"
    return ""


def obstacles(mine: Entry, machines: Sequence[Machine], least: int) -> dict[str, str]:
    """Return nothing if enough machines are ready for a launch, else why the others are not."""
    reasons = {machine.name: blocked(mine, machine) for machine in machines}
    few = {name: why for name, why in reasons.items() if why}
    return few if len(machines) - len(few) < least else {}


def holders(machine: Machine) -> str:
    """Say who has what a launch waits for; nothing if enough is free."""
    some = [one for one in machine.entries if one.state in (STARTING, RUNNING) and one.keys]
    if machine.free >= machine.wants or not some:
        return ""
    who = ", ".join(f"{one.user}'s {one.job}" for one in some)
    return f"; {who} {'has' if len(some) == 1 else 'have'} the rest"


def count_before(mine: Entry, machines: Sequence[Machine]) -> int:
    """Return how many launches wait before this one on any of its nodes."""
    return len({one.id for machine in machines for one in ahead(mine, machine.entries)})
