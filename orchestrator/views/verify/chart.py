"""Draw a verify run as one SVG file: time and bandwidth by size, and the speed of each link.

Written by hand: the head has no plotting library, and this needs lines, circles and text. Its
colours follow the reader's light or dark setting; where that is not known it has its own paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from orchestrator.common.text import duration
from orchestrator.views.verify.diagnosis import size, speed

WIDTH, PLOT_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 250, 76, 150, 44, 40
CELL, SHOWN = 46, 16  # of the matrix of pairs; with more nodes it has no numbers
SMALL_CELL = 9
COLOURS = ("#2f7ed8", "#d9822b", "#2a9d62", "#b8529e", "#7a6ff0", "#8a8f98", "#c0392b", "#008b9a")
STYLE = """
.paper { fill: #ffffff } text { fill: #24292f; font: 12px sans-serif }
.title { font-size: 15px; font-weight: 600 } .axis { stroke: #8c959f } .grid { stroke: #8c959f44 }
.cell { stroke: #8c959f66 } .in { fill: #10151a }
@media (prefers-color-scheme: dark) { .paper { fill: #0d1117 } text { fill: #d6d9e0 } }
"""
Row = Mapping[str, Any]


def draw(results: Mapping[str, Any]) -> str:
    """Return the whole SVG file."""
    rows = [row for row in results.get("collectives", []) if row["bytes"]]
    parts: list[str] = []
    height = 10.0
    if rows:
        best = [{**row, "gbit": 8e-9 * row["busbw"]} for row in rows]
        parts += plot("bus bandwidth, Gb/s", best, "gbit", height, lambda v: f"{v:g}")
        height += PLOT_HEIGHT + TOP + BOTTOM
        parts += plot("time of one call", rows, "seconds", height, duration)
        height += PLOT_HEIGHT + TOP + BOTTOM
    if results.get("pairs"):
        cells, tall = matrix(results["pairs"], height)
        parts += cells
        height += tall
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}"'
    head += f' width="{WIDTH}" height="{height:g}" role="img">'
    paper = f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *parts, "</svg>"]) + "\n"


# -- lines over sizes -----------------------------------------------------------------------------


def plot(
    title: str, rows: Sequence[Row], figure: str, top: float, show: Callable[[float], str]
) -> list[str]:
    """Plot one line per collective and scope; both axes are logarithmic."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row[figure] > 0:
            lines.setdefault(name_of(row), []).append(row)
    values = [row[figure] for line in lines.values() for row in line]
    sizes = sorted({row["bytes"] for row in rows})
    low, high = decades(values)
    right, bottom = WIDTH - RIGHT, top + TOP + PLOT_HEIGHT

    def x(count: float) -> float:
        return LEFT + (right - LEFT) * share(count, sizes[0], sizes[-1])

    def y(value: float) -> float:
        return bottom - PLOT_HEIGHT * share(value, low, high)

    parts = [label(LEFT, top + 24, title, "title")]
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = y(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(label(LEFT - 8, at + 4, show(10.0**power), anchor="end"))
    for count in sizes_shown(sizes):
        parts.append(label(x(count), bottom + 18, size(count), anchor="middle"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(row['bytes']):.1f},{y(row[figure]):.1f}" for row in line)
        drawn = f'fill="none" stroke="{colour}" stroke-width="2"'
        parts.append(f'<polyline points="{points}" {drawn}/>')
        parts += [dot(x(row["bytes"]), y(row[figure]), colour, row) for row in line]
        at = top + TOP + 14 + 20 * number
        parts.append(
            f'<rect x="{right + 14}" y="{at - 9}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(label(right + 30, at, name))
    return parts


def name_of(row: Row) -> str:
    more = {"all": "", "node": ", in a node", "across": ", across"}[row["scope"]]
    return f"{row['collective']}{more}"


def dot(x: float, y: float, colour: str, row: Row) -> str:
    """Draw one measurement; pointing at it shows its figures."""
    title = f"{name_of(row)}: {size(row['bytes'])} in {duration(row['seconds'])}"
    title += f", {speed(row['busbw'])}"
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" data-bytes="{row["bytes"]}">'
    return f"{circle}<title>{escape(title)}</title></circle>"


def decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the whole powers of ten around all values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def sizes_shown(sizes: Sequence[int]) -> list[int]:
    """Return as many sizes as there is room to write."""
    step = max(1, -(-len(sizes) // 8))
    return list(sizes[::step])


# -- the links -----------------------------------------------------------------------------------


def matrix(pairs: Sequence[Row], top: float) -> tuple[list[str], float]:
    """Draw a row for each sender and a column for each receiver; the paler, the slower."""
    nodes = sorted({row["from"] for row in pairs} | {row["to"] for row in pairs})
    cell = CELL if len(nodes) <= SHOWN else min(SMALL_CELL, (WIDTH - LEFT - 10) / len(nodes))
    fastest = max(row["rate"] for row in pairs)
    column = {node: number for number, node in enumerate(nodes)}
    origin = top + TOP + 24
    parts = [label(LEFT, top + 24, "from a node (rows) to a node (columns), Gb/s", "title")]
    if cell == CELL:
        for node, at in column.items():
            parts.append(label(LEFT + cell * (at + 0.5), origin - 8, str(node), anchor="middle"))
            parts.append(label(LEFT - 10, origin + cell * (at + 0.6), f"node {node}", anchor="end"))
    for row in pairs:
        x, y = LEFT + cell * column[row["to"]], origin + cell * column[row["from"]]
        title = f"node {row['from']} to node {row['to']}: {speed(row['rate'])}"
        title += f", {duration(row['latency'])} one way"
        look = f'fill="{shade(row["rate"] / fastest)}" class="cell"'
        box = f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" {look}>'
        parts.append(f"{box}<title>{escape(title)}</title></rect>")
        if cell == CELL:
            text = f"{8e-9 * row['rate']:.2g}"
            parts.append(label(x + cell / 2, y + cell / 2 + 4, text, "in", anchor="middle"))
    return parts, TOP + 24 + cell * len(nodes) + 20


def shade(part: float) -> str:
    """Return a colour from orange, for a slow pair, to green."""
    slow, fast = (240, 130, 60), (120, 200, 140)
    part = min(1.0, max(0.0, part))
    return "#" + "".join(
        f"{round(a + (b - a) * part):02x}" for a, b in zip(slow, fast, strict=True)
    )


# -- text -----------------------------------------------------------------------------------------


def label(x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
    style = f' class="{look}"' if look else ""
    position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {position}{style}>{escape(text)}</text>"
