"""The pictures of the docs show something; scripts/pictures.py films a real launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.launching import PATIENCE
from tests.views.report.test_browser import near, pixels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LARGEST = 150_000  # bytes
BLUE = (0x09, 0x69, 0xDA)  # near that of the first line of a chart


def check_film(path: Path) -> None:
    film = ElementTree.parse(path).getroot()
    frames = [each for each in film.iter() if each.get("class") == "f"]
    told = "\n".join(film.itertext())
    for shown in ("$ master_launch train.py", "2/2 nodes", "d detach", "done", "prefers-reduced"):
        assert shown in told, told
    assert len(frames) > 20 and told.count("@keyframes") == len(frames)


def test_the_docs_pictures_show_something() -> None:
    directory = ROOT / "docs" / "pictures"
    sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert {*sizes} == {
        "launch.svg",
        "top.svg",
        "dashboard.png",
        "experiment.png",
        "report.png",
    }
    assert max(sizes.values()) < LARGEST, sizes
    top = "\n".join(ElementTree.parse(directory / "top.svg").getroot().itertext())
    for shown in ("127.0.0.3", "gpt-small_", "LEFT", "quit"):
        assert shown in top, top
    for path in directory.glob("*.png"):
        colors = pixels(path)
        paper = colors[bytes((255, 255, 255))]
        assert paper > 10_000 and colors.total() - paper > 10_000, path
    for name in ("experiment.png", "report.png"):
        colors = pixels(directory / name)
        assert sum(count for each, count in colors.items() if near(each, BLUE)) > 300, name
    check_film(directory / "launch.svg")


def test_the_film_is_of_a_real_launch(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "scripts" / "pictures.py"), str(tmp_path / "out")]
    made = subprocess.run(
        [*words, "--launch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * PATIENCE,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    check_film(tmp_path / "out" / "launch.svg")
