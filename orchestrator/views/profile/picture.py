"""Draw what the ranks' steps went into as one SVG file: a bar per rank, split into its parts.

Its colours follow the reader's light or dark setting; where that is not known it has its own paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from orchestrator.traces.overlap import Overlap
from orchestrator.traces.rank import Rank
from orchestrator.views.profile.hint import ms

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 880, 190, 90, 84, 44
BAR, GAP = 18, 6
THIN, DENSE = 5, 1  # of more ranks than fit on a screen
MANY = 40
STYLE = """
.paper { fill: #ffffff } text { fill: #24292f; font: 12px sans-serif }
.title { font-size: 15px; font-weight: 600 } .soft { fill: #57606a } .grid { stroke: #8c959f44 }
.compute { fill: #2f7ed8 } .hidden { fill: #7a6ff0 } .exposed { fill: #d9822b }
.copies { fill: #008b9a } .data { fill: #b8529e } .idle { fill: #c4cad1 }
@media (prefers-color-scheme: dark) { .paper { fill: #0d1117 } text { fill: #d6d9e0 }
.soft { fill: #9198a1 } .idle { fill: #3d444d } .hidden { fill: #9a91ff } }
"""
PARTS = {
    "compute": "computing",
    "hidden": "computing and communicating",
    "exposed": "communicating only",
    "copies": "copies only",
    "data": "waiting for data",
    "idle": "idle",
}


def parts_of(rank: Rank) -> dict[str, float]:
    """Split a step into milliseconds that add up to it."""
    parts = {
        "compute": rank.compute_ms - rank.overlapped_ms,
        "hidden": rank.overlapped_ms,
        "exposed": rank.exposed_ms,
        "copies": rank.copying_ms,
        "data": rank.data_ms,
        "idle": rank.idle_ms - rank.data_ms,
    }
    return {name: max(0.0, value) / rank.steps for name, value in parts.items()}


def draw(overlap: Overlap, label: Callable[[int], str], title: str) -> str:
    """Return the whole SVG file."""
    parts = {number: parts_of(rank) for number, rank in overlap.ranks.items()}
    many = len(parts) > MANY
    bar, gap = (THIN, DENSE) if many else (BAR, GAP)
    longest = max((sum(own.values()) for own in parts.values()), default=0.0) or 1.0
    plot = WIDTH - LEFT - RIGHT
    bottom = TOP + len(parts) * (bar + gap)
    height = bottom + BOTTOM
    shown = [name for name in PARTS if any(own[name] > 0 for own in parts.values())]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        text(16, 26, title, "title"),
        *legend(shown),
    ]
    for value in ticks(longest):
        x = LEFT + plot * value / longest
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        lines.append(text(x, bottom + 18, f"{value:g}", "soft", "middle"))
    lines.append(text(WIDTH - RIGHT + 8, bottom + 18, "ms per step", "soft"))
    for row, (number, own) in enumerate(parts.items()):
        y = TOP + row * (bar + gap)
        if not many or row % 8 == 0:
            slow = " slowest" if number == overlap.straggler else ""
            lines.append(text(LEFT - 8, y + min(bar, 14), f"{label(number)}{slow}", anchor="end"))
        lines += bars(own, y, bar, plot / longest, label(number))
        if not many:
            end = LEFT + plot * sum(own.values()) / longest
            lines.append(text(end + 6, y + 14, ms(sum(own.values())), "soft"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def bars(own: dict[str, float], y: float, height: int, scale: float, who: str) -> list[str]:
    x, lines, whole = float(LEFT), [], sum(own.values()) or 1.0
    for name, value in own.items():
        if value <= 0:
            continue
        told = f"{who}: {PARTS[name]} {ms(value)} ms, {value / whole:.0%} of the step"
        lines.append(
            f'<rect class="{name}" x="{x:.2f}" y="{y}" width="{value * scale:.2f}"'
            f' height="{height}"><title>{escape(told)}</title></rect>'
        )
        x += value * scale
    return lines


def legend(names: list[str]) -> list[str]:
    x, lines = 16.0, []
    for name in names:
        lines.append(f'<rect class="{name}" x="{x:.0f}" y="44" width="12" height="12" rx="2"/>')
        lines.append(text(x + 18, 55, PARTS[name]))
        x += 38 + 6.6 * len(PARTS[name])
    return lines


def ticks(longest: float) -> list[float]:
    """Return round numbers from zero to the end of the axis."""
    unit = 10.0 ** (math.floor(math.log10(longest)) - 1)
    step = next(s * unit for s in (1, 2, 5, 10, 20, 50, 100) if longest / (s * unit) <= 8)
    return [round(step * n, 9) for n in range(int(longest / step) + 1)]


def text(x: float, y: float, what: str, name: str = "", anchor: str = "start") -> str:
    kind = f' class="{name}"' if name else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{where}>{escape(what)}</text>'
