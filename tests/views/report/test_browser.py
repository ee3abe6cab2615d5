"""The page in a real browser: no errors, and every chart really drawn."""

import struct
import zlib
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.head.status import comparison
from orchestrator.views.report import page, run_data
from tests.browser import Browser
from tests.views.report.reports import experiment

pytestmark = pytest.mark.browser


def pixels(png: Path) -> Counter[bytes]:
    """Count the colors of a picture of 8 bits, with an alpha channel or without."""
    data = png.read_bytes()
    width, height, _, color = struct.unpack(">IIBB", data[16:26])
    each = {2: 3, 6: 4}[color]
    packed, at = b"", 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += size + 12
    raw, above = zlib.decompress(packed), bytes(width * each)
    colors: Counter[bytes] = Counter()
    for y in range(height):
        begin = y * (width * each + 1)
        row = bytearray(raw[begin + 1 : begin + 1 + width * each])
        undo(raw[begin], row, above, each)
        above = bytes(row)
        colors.update(above[i : i + 3] for i in range(0, len(above), each))
    return colors


def near(color: bytes, wanted: tuple[int, int, int]) -> bool:
    """Return True if a color is close to that of a line, as at its smoothed edges."""
    return sum(abs(one - other) for one, other in zip(color, wanted, strict=True)) < 90


def undo(kind: int, row: bytearray, above: bytes, each: int) -> None:
    """Undo the filter of one row, as PNG defines it."""
    for i in range(len(row) if kind else 0):
        left = row[i - each] if i >= each else 0
        up, corner = above[i], above[i - each] if i >= each else 0
        if kind == 1:
            row[i] = (row[i] + left) & 255
        elif kind == 2:
            row[i] = (row[i] + up) & 255
        elif kind == 3:
            row[i] = (row[i] + (left + up) // 2) & 255
        else:
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda value: abs(guess - value))
            row[i] = (row[i] + nearest) & 255


def test_charts_are_drawn_in_light_and_dark(tmp_path: Path) -> None:
    made = [experiment(tmp_path / name, steps=3000) for name in ("one", "two")]
    with Browser(tmp_path) as browser:
        for dark, width, chosen, line, paper in (
            (False, 900, made[:1], (0x00, 0x4C, 0xFF), (255, 255, 255)),
            (True, 500, made, (0xCA, 0x7C, 0x07), (0x0F, 0x13, 0x18)),
        ):
            told = [run_data.read_run_data(each, len(chosen) - 1) for each in chosen]
            html = tmp_path / f"report of {len(chosen)}.html"
            differences = comparison.find_differences(*map(comparison.describe_experiment, chosen))
            html.write_text(page.report_page(told, differences))
            browser.look(width, 1600, dark=dark)
            browser.open(html.as_uri())
            here = f"location.href == '{html.as_uri()}'"
            drawn = browser.until(f"{here} && +document.documentElement.dataset.drawn")
            assert drawn == browser.eval("document.querySelectorAll('figure').length") >= 7
            assert browser.console == []
            colors = pixels(browser.picture(tmp_path / "picture.png"))
            assert colors[bytes(paper)] > 10_000
            # The curves.
            assert sum(count for color, count in colors.items() if near(color, line)) > 300
