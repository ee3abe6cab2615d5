"""The page in a real browser: no errors, and every chart really drawn."""

from pathlib import Path

import pytest

from orchestrator.head.status import comparison
from orchestrator.views.report import page, run_data
from tests.browser import Browser
from tests.views.report.reports import experiment

pytestmark = pytest.mark.browser


def near(color: bytes, wanted: tuple[int, int, int]) -> bool:
    """Return True if a color is close to that of a line, as at its smoothed edges."""
    return sum(abs(one - other) for one, other in zip(color, wanted, strict=True)) < 90


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
            colors = browser.colors(browser.picture(tmp_path / "picture.png"))
            assert colors[bytes(paper)] > 10_000
            # The curves.
            assert sum(count for color, count in colors.items() if near(color, line)) > 300
