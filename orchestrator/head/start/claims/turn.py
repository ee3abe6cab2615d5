"""Decide whose turn it is on the nodes that a launch waits for. Pure.

The queue is the launches themselves: each has an entry on each of its nodes. The order is the time
of the entry, then its id. It is the same on all nodes, so the first of all can always go ahead.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.protocol.requests.claims import WAITING, Entry
from orchestrator.protocol.requests.start import Page


def ahead(mine: Entry, page: Page) -> list[Entry]:
    """Return the entries that wait on a node before this one, the first of all first."""
    waiting = [one for one in page.entries if one.state == WAITING and one.rank < mine.rank]
    return sorted(waiting, key=lambda one: one.rank)


def blocked(mine: Entry, page: Page) -> str:
    """Say why a launch cannot start on a node yet; nothing if it can.

    It goes before others only where it leaves enough for all of them.
    """
    left = page.free - page.wants
    if left < 0:
        return f"{page.free} of {page.wants} free"
    for one in ahead(mine, page):
        left -= one.wants
        if left < 0:
            return f"{one.user}'s {one.job} waits before it"
    return ""


def obstacles(mine: Entry, pages: Mapping[str, Page], least: int) -> dict[str, str]:
    """Return nothing if enough nodes are ready for a launch, else why the others are not."""
    reasons = {name: why for name, page in pages.items() if (why := blocked(mine, page))}
    return reasons if len(pages) - len(reasons) < least else {}


def holders(page: Page) -> str:
    """Say who has what a launch waits for; nothing if enough is free."""
    some = [one for one in page.entries if one.keys]
    if page.free >= page.wants or not some:
        return ""
    who = ", ".join(f"{one.user}'s {one.job}" for one in some)
    return f"; {who} {'has' if len(some) == 1 else 'have'} the rest"
