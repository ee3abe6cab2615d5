"""Numbers, sizes, times and tables as people write and read them.

Shipped to the nodes, where the engine uses it: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

from orchestrator.common.errors import UsageError, did_you_mean

# A function that shows the user a line.
Say = Callable[[str], None]
# A unit of time and its seconds. Other spellings, and the plural, are understood as well.
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
TIME_UNITS = {
    **{name: name for name in SECONDS},
    **{"sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "day": "d", "week": "w"},
}
# Each unit is a power of two.
BYTES = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


# -- writing ----------------------------------------------------------------------------------


def format_bytes(count: float, *, binary: bool = False) -> str:
    """Write a number of bytes with three digits: 1.5 GB, or in powers of two 1.4 GiB."""
    step, units = (1024, ("KiB", "MiB", "GiB", "TiB")) if binary else (1000, ("kB", "MB", "GB"))
    value, unit = float(count), "B"
    for larger in (*units, *(() if binary else ("TB",))):
        if value < 999.5:
            break
        value, unit = value / step, larger
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def format_duration(seconds: float) -> str:
    """Write a time with three digits, from a minute on in two units: 12 ms, 7.5 s, 2 h 05 min."""
    if round(seconds) < 60:
        scale, unit = next(
            (pair for pair in ((1.0, "s"), (1e-3, "ms")) if seconds >= pair[0]), (1e-6, "us")
        )
        return f"{seconds / scale:.3g} {unit}" if seconds else "0 s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: 1 node, 2 nodes."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def align_columns(
    rows: Sequence[Sequence[str]], right: Container[int] = (), widest: int = 1 << 20
) -> list[str]:
    """Align the columns of these rows; those with a number in `right` at their right ends.

    A cell that is wider than `widest` moves only its own row.
    """
    widths = [
        max((len(cell) for cell in column if len(cell) <= widest), default=0)
        for column in zip(*rows, strict=True)
    ]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# -- reading ----------------------------------------------------------------------------------


def number_and_unit(text: str) -> tuple[float, str] | None:
    """Split `1.5 GB` into 1.5 and "GB"; return None for other text."""
    match = NUMBER_AND_UNIT.fullmatch(text)
    return (float(match[1]), match[2]) if match else None


def time_unit(word: str) -> str | None:
    """Return the letter of a unit of time, however it is spelled."""
    word = word.lower()
    return TIME_UNITS.get(word) or TIME_UNITS.get(word.removesuffix("s"))


def parse_seconds(name: str, text: str) -> float:
    """Read `90s`, `36h`, `1.5 hours` or `14d`; the UsageError says what is wrong with it."""
    parts = number_and_unit(text)
    if parts is None:
        raise UsageError(f"{name} {text}: not a time", "write it like 90s, 10m, 36h or 14d")
    unit = time_unit(parts[1])
    if unit is None:
        hint = did_you_mean(parts[1], TIME_UNITS)
        what = f"there is no unit {parts[1]!r}{hint}" if parts[1] else "the unit is missing"
        fix = "the units are s, m (minutes), h (hours), d (days) and w (weeks)"
        raise UsageError(f"{name} {text}: {what}", fix)
    return parts[0] * SECONDS[unit]


def parse_size(name: str, text: str) -> int:
    """Read `64M`, `8g` or `1.5GiB`: bytes in powers of 1024, as memory is sold."""
    parts = number_and_unit(text)
    unit = re.fullmatch("([kmgt]?)(i?b)?", parts[1].lower()) if parts else None
    if parts is None or unit is None:
        raise UsageError(f"{name} {text}: not a size", "write a number with K, M or G, such as 8G")
    return int(parts[0] * (1 << BYTES[unit[1]]))
