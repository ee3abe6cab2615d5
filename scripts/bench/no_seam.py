"""Train with random faults and without, and draw both curves: they must be one.

    python scripts/bench/no_seam.py [--faults 6] [--seed 1] [--private] [--svg docs/no_seam.svg]

Root: the hosts, four nodes and a spare, are network namespaces. Exits with 1 where the two differ.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from ground import require_root
from harm_faults import FAULTS, order

from tests.clusters.netns import NetnsCluster
from tests.end_to_end.harm import Seam
from tests.end_to_end.no_seam import NoSeam, Noted

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 380, 62, 20, 56, 46
COLOURS = {"rank": "#d9480f", "node": "#5f3dc4", "head": "#087f5b", "": "#495057"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Many faults in one training, and none in it.")
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="until the last fault")
    parser.add_argument("--private", action="store_true", help="each node has its own disk")
    parser.add_argument("--svg", type=Path, help="where the picture of both curves goes")
    options = parser.parse_args()
    require_root()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orchestrator-no-seam-") as name:
        work, notes = Path(name) / "work", Path(name) / "notes"
        work.mkdir()
        disks = [work] if options.private else []
        cluster = NetnsCluster(5, Path(name) / "cluster", tmpfs=disks)
        with cluster:
            kinds = order(random.Random(options.seed), options.faults)
            faults = [(kind, FAULTS[kind]) for kind in kinds]
            shared = notes if options.private else None
            one = NoSeam(cluster, work, options.seed, faults, options.pace, shared)
            one.minutes, one.say = options.minutes, say
            try:
                broken, whole = one.run()
            except Seam as seam:
                sys.exit(f"seed {options.seed}, after {len(one.noted)} faults: {seam}")
    minutes, load = (time.monotonic() - began) / 60, os.getloadavg()[1]
    said = (
        f"{len(one.noted)} faults in {one.steps} steps, {one.noted[-1].attempts} attempts: losses,"
        f" samples and weights are those without faults, to the bit"
    )
    print(f"{said} (seed {options.seed}, {minutes:.0f} minutes, load {load:.0f})")
    for kind, count in sorted(Counter(fault.kind for fault in one.noted).items()):
        print(f"  {count} {kind}")
    if options.svg:
        options.svg.write_text(picture(whole.losses, broken.losses, one.noted, said))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def picture(
    whole: Mapping[int, float], broken: Mapping[int, float], faults: Sequence[Noted], said: str
) -> str:
    """Draw the loss without faults as a broad line, that with faults on it, and the faults."""
    last, most = max(whole), max(*whole.values(), *broken.values())

    def at(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / most

    def line(losses: Mapping[int, float], colour: str, width: float) -> str:
        points = " ".join("{:.1f},{:.1f}".format(*at(*pair)) for pair in sorted(losses.items()))
        look = f'fill="none" stroke="{colour}" stroke-width="{width}"'
        return f'<polyline points="{points}" {look}/>'

    def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#212529") -> str:
        look = f'text-anchor="{anchor}" fill="{colour}"'
        return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'

    bottom = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(LEFT, 20, said),
    ]
    for fault in faults:
        x, _ = at(fault.step, 0.0)
        colour = COLOURS[family(fault.kind)]
        title = f"<title>{escape(f'step {fault.step}: {fault.kind} ({fault.where})')}</title>"
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}"'
            f' stroke-width="1" opacity="0.55">{title}</line>'
        )
    parts += [line(whole, "#a5d8ff", 6), line(broken, "#1864ab", 1.3)]
    for part in range(5):
        x, y = at(last * part / 4, most * part / 4)
        parts += [text(x, bottom + 18, f"{last * part // 4}", "middle")]
        parts += [text(LEFT - 8, y + 4, f"{most * part / 4:.2f}", "end")]
    parts.append(f'<path d="M{LEFT},{TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="#868e96"/>')
    parts.append(text(WIDTH - RIGHT, HEIGHT - 8, "step", "end"))
    parts.append(text(LEFT, TOP - 8, "loss"))
    legend = [("without faults", "#4dabf7"), ("with faults", "#1864ab")]
    names = {"rank": "a process killed", "node": "a node or link cut", "head": "the head killed"}
    legend += [(words, COLOURS[kind]) for kind, words in names.items()]
    for number, (words, colour) in enumerate(legend):
        x = LEFT + 90 + number * 150
        parts.append(f'<rect x="{x}" y="{TOP - 17}" width="14" height="8" fill="{colour}"/>')
        parts.append(text(x + 20, TOP - 8, words))
    return "\n".join([*parts, "</svg>", ""])


def family(kind: str) -> str:
    if kind.startswith("head"):
        return "head"
    return "node" if "cut" in kind or "rebooted" in kind else "rank"


if __name__ == "__main__":
    main()
