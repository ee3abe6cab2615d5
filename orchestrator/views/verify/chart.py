"""Draw a verify run as one SVG file: time and bandwidth by size, and the speed of each link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common.text import duration
from orchestrator.views.templates import templates_in
from orchestrator.views.verify.diagnosis import size, speed

TEMPLATES = templates_in(Path(__file__).parent / "web")
WIDTH, PLOT_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 250, 76, 150, 44, 40
CELL, SHOWN = 46, 16  # of the matrix of pairs; with more nodes it has no numbers
SMALL_CELL = 9
COLOURS = ("#2f7ed8", "#d9822b", "#2a9d62", "#b8529e", "#7a6ff0", "#8a8f98", "#c0392b", "#008b9a")
Row = Mapping[str, Any]


def draw(results: Mapping[str, Any]) -> str:
    """Return the whole SVG file."""
    rows = [row for row in results.get("collectives", []) if row["bytes"]]
    plots: list[Plot] = []
    height = 10.0
    if rows:
        best = [{**row, "gbit": 8e-9 * row["busbw"]} for row in rows]
        each = PLOT_HEIGHT + TOP + BOTTOM
        plots.append(plot("bus bandwidth, Gb/s", best, "gbit", height, "{:g}".format))
        plots.append(plot("time of one call", rows, "seconds", height + each, duration))
        height += 2 * each
    pairs = results.get("pairs", [])
    links = matrix(pairs, height) if pairs else {"cells": ()}
    return TEMPLATES.get_template("verify.svg").render(
        plots=plots,
        colours=COLOURS,
        **{"width": WIDTH, "left": LEFT, "right": WIDTH - RIGHT, "plot_height": PLOT_HEIGHT},
        **{"top": height, "height": links.get("end", height), **links},
    )


# -- lines over sizes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """One measurement; pointing at it shows its figures."""

    x: float
    y: float
    size: int
    words: str


@dataclass(frozen=True)
class Plot:
    """Lines whose axes are both logarithmic, each with its marks and their words."""

    title: str
    bottom: float
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    lines: dict[str, list[Dot]]  # one per collective and scope


def plot(
    title: str, rows: Sequence[Row], figure: str, top: float, show: Callable[[float], str]
) -> Plot:
    values = [row[figure] for row in rows if row[figure] > 0]
    sizes = sorted({row["bytes"] for row in rows})
    low, high = decades(values)
    bottom = top + TOP + PLOT_HEIGHT

    def x(count: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * share(count, sizes[0], sizes[-1])

    def y(value: float) -> float:
        return bottom - PLOT_HEIGHT * share(value, low, high)

    lines: dict[str, list[Dot]] = {}
    for row in rows:
        if row[figure] > 0:
            name = name_of(row)
            words = f"{name}: {size(row['bytes'])} in {duration(row['seconds'])}"
            words += f", {speed(row['busbw'])}"
            dot = Dot(x(row["bytes"]), y(row[figure]), row["bytes"], words)
            lines.setdefault(name, []).append(dot)
    powers = range(round(math.log10(low)), round(math.log10(high)) + 1)
    step = max(1, -(-len(sizes) // 8))  # as many sizes as there is room to write
    return Plot(
        title,
        bottom,
        rows=[(y(10.0**power), show(10.0**power)) for power in powers],
        columns=[(x(count), size(count)) for count in sizes[::step]],
        lines=lines,
    )


def name_of(row: Row) -> str:
    more = {"all": "", "node": ", in a node", "across": ", across"}[row["scope"]]
    return f"{row['collective']}{more}"


def decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the whole powers of ten around all values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


# -- the links ------------------------------------------------------------------------------------


def matrix(pairs: Sequence[Row], top: float) -> dict[str, Any]:
    """Place a row for each sender and a column for each receiver; the paler, the slower."""
    nodes = sorted({row["from"] for row in pairs} | {row["to"] for row in pairs})
    numbered = len(nodes) <= SHOWN
    cell = CELL if numbered else min(SMALL_CELL, (WIDTH - LEFT - 10) / len(nodes))
    fastest = max(row["rate"] for row in pairs)
    places = {node: number for number, node in enumerate(nodes)}
    origin = top + TOP + 24
    cells = []
    for row in pairs:
        words = f"node {row['from']} to node {row['to']}: {speed(row['rate'])}"
        words += f", {duration(row['latency'])} one way"
        x, y = LEFT + cell * places[row["to"]], origin + cell * places[row["from"]]
        cells.append((x, y, shade(row["rate"] / fastest), f"{8e-9 * row['rate']:.2g}", words))
    return {
        **{"cells": cells, "cell": cell, "numbered": numbered, "places": places},
        **{"origin": origin, "end": origin + cell * len(nodes) + 20},
    }


def shade(part: float) -> str:
    """Return a colour from orange, for a slow pair, to green."""
    slow, fast = (240, 130, 60), (120, 200, 140)
    part = min(1.0, max(0.0, part))
    return "#" + "".join(
        f"{round(a + (b - a) * part):02x}" for a, b in zip(slow, fast, strict=True)
    )
