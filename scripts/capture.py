#!/usr/bin/env python3
"""Run a command in a real terminal and draw what it shows: scripts/capture.py OUT COMMAND...

    scripts/capture.py --rows 26 --when "· step 85/120" demo.svg orchestrator demo

For pictures.py it makes that of `orchestrator top`, and the film of a launch. Needs pyte, a
terminal emulator (in the `test` extra).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from html import escape
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import pyte

CELL_WIDTH, CELL_HEIGHT, MARGIN, BAR = 8.4, 18, 14, 30
SILENT, PATIENCE = 0.2, 150.0  # seconds
BACKGROUND, FOREGROUND = "#16181d", "#d6d9e0"
COLORS = {
    **{"black": "#5c6370", "red": "#ef6b73", "green": "#8fc379", "brown": "#e2b86b"},
    **{"blue": "#6cb2f7", "magenta": "#c98be0", "cyan": "#5ec4ce", "white": "#d6d9e0"},
    **{"brightblack": "#7f8896", "brightcyan": "#7fdde6", "brightblue": "#8cc6ff"},
    **{"brightgreen": "#a9dc93", "brightmagenta": "#dca6f0", "brightred": "#ff8d94"},
}


# The cells of pyte by their column.
Line = dict[int, Any]


def record(command: list[str], columns: int, rows: int) -> list[Line]:
    """Return the terminal's lines after the command has ended, including what scrolled away."""
    screen = pyte.HistoryScreen(columns, rows, history=100_000)
    for _, data in play(command, screen):
        sys.stdout.buffer.write(data)
    lines = [*screen.history.top, *shown(screen)]
    while lines and not "".join(cell.data for cell in lines[-1].values()).strip():
        lines.pop()
    return lines


def glimpse(
    command: list[str], columns: int, rows: int, there: Callable[[str], object], keys: str
) -> list[Line]:
    """Return the first screen of which `there` is true, and type `keys`, which end the command.

    A screen counts once nothing more comes for a moment: before that it may be half drawn.
    """
    screen = pyte.Screen(columns, rows)
    seen: list[Line] = []
    deadline = time.monotonic() + PATIENCE
    for terminal, data in play(command, screen):
        if not seen and not data and there("\n".join(screen.display)):
            seen = shown(screen)
            deadline = 0.0
        if time.monotonic() > deadline:
            os.write(terminal, keys.encode())
            deadline = float("inf")
    if not seen:
        text = "\n".join(screen.display).rstrip()
        raise SystemExit(f"{command[0]} ended before it showed what was waited for:\n{text}")
    return seen


def shown(screen: pyte.Screen) -> list[Line]:
    """Return the lines on the screen now, which later output does not change."""
    return [dict(screen.buffer[row]) for row in range(screen.lines)]


def play(command: list[str], screen: pyte.Screen) -> Iterator[tuple[int, bytes]]:
    """Run a command in a terminal of the screen's size; yield the terminal, and what it printed.

    While it is silent that is nothing, a few times a second.
    """
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.execvp(command[0], command)
    size = struct.pack("HHHH", screen.lines, screen.columns, 0, 0)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
    while True:
        if not select.select([terminal], [], [], SILENT)[0]:
            yield terminal, b""
            continue
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:
            # The last process that had the terminal open has closed it.
            break
        if not data:
            break
        stream.feed(data)
        yield terminal, data
    os.waitpid(pid, 0)
    os.close(terminal)


def color_of(name: str, default: str) -> str:
    """Return a colour of pyte's for SVG: one by name, or six hexadecimal digits."""
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else COLORS.get(name, default)


def style(cell: Any) -> tuple[str, str, bool]:
    """Return the colours of a cell and of what is behind it, and whether it is bold."""
    front, behind = color_of(cell.fg, FOREGROUND), color_of(cell.bg, BACKGROUND)
    if cell.reverse:
        front, behind = behind, front
    return front, behind, cell.bold


def draw(lines: list[Line], columns: int, title: str) -> str:
    parts = frame(columns, len(lines), title)
    for number, line in enumerate(lines):
        parts += drawn(line, columns, BAR + number * CELL_HEIGHT)
    return "\n".join([*parts, "</svg>", ""])


def frame(columns: int, rows: int, title: str) -> list[str]:
    """Return the begin of a picture: the window around a screen of this size."""
    width = columns * CELL_WIDTH + 2 * MARGIN
    height = rows * CELL_HEIGHT + MARGIN + BAR
    font = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="{font}" font-size="14">',
        f"<desc>{escape(made())}</desc>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        *(
            f'<circle cx="{18 + 18 * i}" cy="16" r="5.5" fill="{color}"/>'
            for i, color in enumerate(("#ef6b73", "#e2b86b", "#8fc379"))
        ),
        f'<text x="{width / 2:.0f}" y="20" fill="#7f8896" text-anchor="middle">'
        f"{escape(title)}</text>",
    ]


def made() -> str:
    """Return the revision that a picture shows, and how busy this machine was."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    revision = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return f"revision {revision}, load {os.getloadavg()[0]:.1f}"


def drawn(line: Line, columns: int, top: int) -> list[str]:
    """Return the drawing of one line of a screen: the background first."""
    cells = [(column, line[column]) for column in range(columns) if column in line]
    boxes, texts = [], []
    for (front, behind, bold), group in groupby(cells, key=lambda cell: style(cell[1])):
        run = list(group)
        text = "".join(cell.data for _, cell in run)
        x, wide = MARGIN + run[0][0] * CELL_WIDTH, len(text) * CELL_WIDTH
        if behind != BACKGROUND:
            boxes.append(
                f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" '
                f'height="{CELL_HEIGHT}" fill="{behind}"/>'
            )
        if text.strip():
            weight = ' font-weight="bold"' if bold else ""
            y = top + 0.8 * CELL_HEIGHT
            texts.append(
                f'<text x="{x:.1f}" y="{y:.1f}" fill="{front}"{weight} xml:space="preserve" '
                f'textLength="{wide:.1f}">{escape(text)}</text>'
            )
    return [*boxes, *texts]


# -- a film ----------------------------------------------------------------------------------------
# Each line is drawn once, and each frame shows some of them for its time. Without motion, as a
# reader may wish, the last frame stays.

# Seconds that a frame is shown.
QUICKEST, LONGEST, LAST = 0.12, 0.3, 3.0
# The limit of the whole film in seconds.
SECONDS = 12.0
# The time and the lines of each frame.
Film = list[tuple[float, list[Line]]]


def film(command: list[str], columns: int, rows: int) -> Film:
    """Return what a terminal shows from the command's begin to its end, frame by frame."""
    screen = pyte.Screen(columns, rows)
    frames: Film = [(time.monotonic(), shown(screen))]
    for _ in play(command, screen):
        now, lines = time.monotonic(), shown(screen)
        if lines == frames[-1][1]:
            continue
        if now - frames[-1][0] < QUICKEST:
            frames[-1] = (frames[-1][0], lines)
        else:
            frames.append((now, lines))
    frames.append((time.monotonic(), shown(screen)))
    return frames[1:]


def shown_for(frames: Film) -> list[float]:
    """Return the seconds of each frame in a film that is short enough."""
    waits = [min(later - at, LONGEST) for (at, _), (later, _) in pairwise(frames)]
    quicker = max(1.0, sum(waits) / (SECONDS - LAST))
    return [*(wait / quicker for wait in waits), LAST]


def animate(frames: Film, columns: int, title: str) -> str:
    waits = shown_for(frames)
    ends = list(accumulate(waits))
    names: dict[str, str] = {}
    shows, times = [], []
    for number, (_, lines) in enumerate(frames):
        uses = []
        for row, line in enumerate(lines):
            if text := "".join(drawn(line, columns, 0)):
                name = names.setdefault(text, f"l{len(names)}")
                uses.append(f'<use href="#{name}" y="{BAR + row * CELL_HEIGHT}"/>')
        end = 100 * ends[number] / ends[-1]
        begin = end - 100 * waits[number] / ends[-1]
        shows.append(f'<g class="f" style="animation-name:f{number}">{"".join(uses)}</g>')
        times.append(
            f"@keyframes f{number}{{0%{{visibility:hidden}}{begin:.3f}%{{visibility:visible}}"
            f"{end:.3f}%,100%{{visibility:hidden}}}}"
        )
    looks = (
        f".f{{visibility:hidden;animation:{ends[-1]:.2f}s step-end infinite}}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none}"
        ".f:last-of-type{visibility:visible}}"
    )
    lines_of = [f'<g id="{name}">{text}</g>' for text, name in names.items()]
    parts = frame(columns, len(frames[0][1]), title)
    parts += [f"<style>{looks}", *times, "</style><defs>", *lines_of, "</defs>", *shows]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=104)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--last", type=int, help="draw the last N lines only")
    parser.add_argument("--when", help="draw the first screen with this text, then type Ctrl-C")
    parser.add_argument("--title", help="default: the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="options go before OUT")
    options = parser.parse_args()
    if not options.command or shutil.which(options.command[0]) is None:
        parser.error("command not found")
    if options.when:
        words = (options.command, options.columns, options.rows)
        lines = glimpse(*words, lambda text: options.when in text, "\x03")
    else:
        lines = record(options.command, options.columns, options.rows)
    if options.last:
        lines = lines[-options.last :]
    options.out.write_text(draw(lines, options.columns, options.title or " ".join(options.command)))


if __name__ == "__main__":
    main()
