"""One node as the network sees it: its name in the list, its facts, how the head reached it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.head.inventory.facts import Facts

MOST_NAMES = 5


@dataclass(frozen=True)
class Member:
    """`reached`: the IP address by which the head reached it, "" behind a jump host."""

    name: str
    facts: Facts
    reached: str
    ifname: str | None = None  # the user's, from the list


def is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def names(members: Sequence[Member]) -> str:
    return listed([one.name for one in members])


def listed(words: Sequence[str]) -> str:
    """gpu01, gpu02 and 62 others"""
    shown = ", ".join(words[:MOST_NAMES])
    more = len(words) - MOST_NAMES
    return f"{shown} and {more} other{'s' if more > 1 else ''}" if more > 0 else shown
