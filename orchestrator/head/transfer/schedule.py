"""Decide who gives files to whom. Pure: nothing is sent here.

Each node that takes files gives them on to others while they come, so all can begin at once.
"""

from __future__ import annotations

from collections.abc import Sequence

# The origin of the files: this machine, or the node that has them.
ORIGIN = -1
# Nodes that the origin gives to, and that each node gives on to.
WIDTH = 2


def givers(sites: Sequence[str | None], width: int = WIDTH) -> list[int]:
    """Return for each node the number of the one that it takes from.

    Of the nodes that can serve one more it is the first one of the same site, if there is one: so
    the files go between two sites as seldom as possible.
    """
    site_of = {ORIGIN: None, **dict(enumerate(sites))}
    room = {ORIGIN: width}
    chosen = []
    for number, site in enumerate(sites):
        same_site = (giver for giver in room if site_of[giver] == site)
        giver = next(same_site, next(iter(room)))
        room[giver] -= 1
        if not room[giver]:
            del room[giver]
        room[number] = width
        chosen.append(giver)
    return chosen
