"""Names of hosts: the ranges in them (gpu[01-03,7]), and whether one names this machine.

Shipped to the nodes: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
from collections.abc import Collection, Iterator

NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


class BadRange(ValueError):
    """A mistake in a name with ranges: where it is, from 0, and what to write instead."""

    def __init__(self, position: int, what: str, fix: str) -> None:
        super().__init__(what)
        self.position, self.what, self.fix = position, what, fix


def expand(pattern: str, most: int) -> Iterator[str]:
    """Expand gpu[01-02] to gpu01, gpu02; BadRange is raised before any name is made."""
    parts: list[list[str]] = []
    count, position = 1, 0
    for index, part in enumerate(re.split(r"\[([^][]*)\]", pattern)):
        stray = re.search(r"[][]", part)
        if stray:
            what = f"nothing {'closes' if stray[0] == '[' else 'opens'} this {stray[0]!r}"
            raise BadRange(position + stray.start(), what, "gpu[1-3,7], closed and without spaces")
        inside = index % 2 == 1
        parts.append(_numbers(part, position + 1, most) if inside else [part])
        position += len(part) + 2 * inside
        count *= len(parts[-1])
        if count > most:
            raise _too_many(0, most)
    return map("".join, itertools.product(*parts))


def _numbers(text: str, position: int, most: int) -> list[str]:
    """Expand 01-03,7 to 01 02 03 7: leading zeros are part of a name."""
    names: list[str] = []
    for part in text.split(","):
        match = NUMBERS.fullmatch(part)
        if not match:
            what = f"{part[:40]!r} is not a range of numbers" if part else "a number is missing"
            raise BadRange(position, what, "a range such as [1-3,7] or [01-16]")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise BadRange(position, "this range runs backwards", f"{high}-{low}")
        if int(high) - int(low) >= most - len(names):
            raise _too_many(position, most)
        names += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
        position += len(part) + 1
    return names


def _too_many(position: int, most: int) -> BadRange:
    return BadRange(position, f"this makes more than {most} nodes", f"{most} nodes at most")


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def out_of_url(host: str) -> str:
    return host[1:-1] if re.fullmatch(r"\[[^]]*:[^]]*\]", host) else host


# -- this machine ------------------------------------------------------------------------------


def is_this_machine(host: str, more: Collection[str] = ()) -> bool:
    """Tell whether a Host header is an address or a name of this machine: no DNS rebinding."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name in {"localhost", os.uname().nodename.lower(), *more}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
