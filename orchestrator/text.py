"""Numbers as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """A number of bytes, such as 1.5 GB."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
