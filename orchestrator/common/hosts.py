"""Names of hosts: the ranges in them (gpu[01-03,7]), and whether one names this machine.

Shipped to the nodes: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

# Limits on the number of names that are listed, and on the length of folded names.
MOST_NAMES, LONGEST_FOLD = 5, 60
NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


class BadRange(ValueError):
    """A mistake in a name with ranges: where it is, from 0, and what to write instead."""

    def __init__(self, position: int, what: str, fix: str) -> None:
        super().__init__(what)
        self.position, self.what, self.fix = position, what, fix


def expand_pattern(pattern: str, most: int) -> Iterator[str]:
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


def fold_names(names: Sequence[str]) -> str:
    """Write names as expand_pattern() reads them: gpu[001-500], 10.0.0.[1-4,7]; each once."""
    apart = {name: re.split(r"([0-9]{1,18})", name) for name in names}
    kinds: dict[tuple[str, ...], list[list[str]]] = {}
    for parts in apart.values():
        kinds.setdefault(tuple(parts[::2]), []).append(parts)
    return ",".join(_folded(alike) for alike in kinds.values())


def _folded(alike: Sequence[Sequence[str]]) -> str:
    """Fold names at the number in which they differ while most of the others agree."""
    places = range(len(alike[0]) - 2, 0, -2)
    if not places:
        return "".join(alike[0])
    place = min(places, key=lambda at: len({(*p[:at], *p[at + 1 :]) for p in alike}))
    groups: dict[tuple[str, ...], list[str]] = {}
    for *before, number in ((*p[:place], "", *p[place + 1 :], p[place]) for p in alike):
        groups.setdefault(tuple(before), []).append(number)
    return ",".join(
        "".join((*parts[:place], _in_brackets(numbers), *parts[place + 1 :]))
        for parts, numbers in groups.items()
    )


def _in_brackets(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"[{number_ranges(numbers)}]"


def number_ranges(numbers: Iterable[str | int]) -> str:
    """Write numbers as ranges: 0-3,5. A leading zero is part of a number: 09-10, but 9-10."""
    runs: list[list[str]] = []
    for number in sorted(map(str, numbers), key=lambda text: (int(text), len(text))):
        last = runs[-1][-1] if runs else ""
        follows = bool(last) and int(number) == int(last) + 1
        if follows and (len(number) == len(last) or "0" not in (number[0], last[0])):
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def join_names(names: Sequence[str]) -> str:
    """Join names: all of a few; else folded where that is short, or the first and a count."""
    more = len(names) - MOST_NAMES
    if more <= 0:
        return ", ".join(names)
    short = fold_names(names)
    if "[" in short and len(short) <= LONGEST_FOLD:
        return short
    return f"{', '.join(names[:MOST_NAMES])} and {more} other{'s' if more > 1 else ''}"


def host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def host_out_of_url(host: str) -> str:
    return host[1:-1] if re.fullmatch(r"\[[^]]*:[^]]*\]", host) else host


# -- this machine ------------------------------------------------------------------------------


def is_this_machine(host: str, more: Collection[str] = ()) -> bool:
    """Return True if a Host header names this machine; others may be DNS rebinding."""
    # The server of a node does not need these imports.
    import ipaddress
    from urllib.parse import urlsplit

    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name not in {"localhost", os.uname().nodename.lower(), *more}:
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@functools.cache
def is_loopback(host: str) -> bool:
    """Return True if an address or name is reachable from this machine alone."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
