#!/usr/bin/env python3
"""Run a command in a real terminal and draw what it shows: scripts/capture.py OUT COMMAND...

Makes the README's picture. Needs pyte, a terminal emulator (in the `test` extra).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import shutil
import struct
import sys
import termios
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte

CELL_WIDTH, CELL_HEIGHT, MARGIN, BAR = 8.4, 18, 14, 30
BACKGROUND, FOREGROUND = "#16181d", "#d6d9e0"
COLORS = {
    **{"black": "#5c6370", "red": "#ef6b73", "green": "#8fc379", "brown": "#e2b86b"},
    **{"blue": "#6cb2f7", "magenta": "#c98be0", "cyan": "#5ec4ce", "white": "#d6d9e0"},
    **{"brightblack": "#7f8896", "brightcyan": "#7fdde6", "brightblue": "#8cc6ff"},
    **{"brightgreen": "#a9dc93", "brightmagenta": "#dca6f0", "brightred": "#ff8d94"},
}


def record(command: list[str], columns: int, rows: int) -> list[dict[int, Any]]:
    """Return the terminal's lines after the command has ended, including what scrolled away."""
    screen = pyte.HistoryScreen(columns, rows, history=100_000)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the last process that had the terminal open has closed it
            break
        if not data:
            break
        sys.stdout.buffer.write(data)
        stream.feed(data)
    os.waitpid(pid, 0)
    shown = [screen.buffer[row] for row in range(rows)]
    lines = [*screen.history.top, *shown]
    while lines and not "".join(cell.data for cell in lines[-1].values()).strip():
        lines.pop()
    return lines


def draw(lines: list[dict[int, Any]], columns: int, title: str) -> str:
    width = columns * CELL_WIDTH + 2 * MARGIN
    height = len(lines) * CELL_HEIGHT + MARGIN + BAR
    font = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="{font}" font-size="14">',
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        *(
            f'<circle cx="{18 + 18 * i}" cy="16" r="5.5" fill="{color}"/>'
            for i, color in enumerate(("#ef6b73", "#e2b86b", "#8fc379"))
        ),
        f'<text x="{width / 2:.0f}" y="20" fill="#7f8896" text-anchor="middle">'
        f"{escape(title)}</text>",
    ]
    for number, line in enumerate(lines):
        y = BAR + (number + 0.8) * CELL_HEIGHT
        cells = [(column, line[column]) for column in range(columns) if column in line]
        for style, group in groupby(cells, key=lambda cell: (cell[1].fg, cell[1].bold)):
            run = list(group)
            text = "".join(cell.data for _, cell in run)
            if not text.strip():
                continue
            x = MARGIN + run[0][0] * CELL_WIDTH
            weight = ' font-weight="bold"' if style[1] else ""
            color = COLORS.get(style[0], FOREGROUND)
            parts.append(
                f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{weight} xml:space="preserve" '
                f'textLength="{len(text) * CELL_WIDTH:.1f}">{escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=104)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--last", type=int, help="draw the last N lines only")
    parser.add_argument("--title", help="default: the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="options go before OUT")
    options = parser.parse_args()
    if not options.command or shutil.which(options.command[0]) is None:
        parser.error("command not found")
    lines = record(options.command, options.columns, options.rows)
    if options.last:
        lines = lines[-options.last :]
    options.out.write_text(draw(lines, options.columns, options.title or " ".join(options.command)))


if __name__ == "__main__":
    main()
