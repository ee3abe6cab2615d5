"""The pictures of the docs show something; scripts/pictures.py films a real launch."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import pictures
from tests.browser import Browser
from tests.launching import Head
from tests.views.report.test_browser import near

ROOT = Path(__file__).parents[2]
# In bytes; a GIF has all pixels of each frame that changes.
LARGEST = {".svg": 150_000, ".png": 150_000, ".gif": 1_000_000}
BLUE = (0x09, 0x69, 0xDA)  # near that of the first line of a chart
TALKS = """
import time
for line in range(30):
    print("epoch", line, flush=True)
    time.sleep(0.1)
"""


FAILED = ("$ master_launch train.py", "the cause", "train.py:7", "what to do")
KILLED = ("$ orchestrator demo --kill", "kill -9 of rank", "2 faults, 0 steps lost", "to the bit")
LAUNCHED = ("$ master_launch train.py", "2/2 nodes", "d detach", "done")


def check_film(path: Path, words: Sequence[str], frames_at_least: int = 20) -> None:
    film = ElementTree.parse(path).getroot()
    frames = [each for each in film.iter() if each.get("class") == "f"]
    told = "\n".join(film.itertext())
    for shown in (*words, "prefers-reduced", "revision "):
        assert shown in told, told
    assert len(frames) > frames_at_least and told.count("@keyframes") == len(frames)


@pytest.mark.browser
def test_pictures_of_docs_show_content(tmp_path: Path) -> None:
    directory = ROOT / "docs" / "pictures"
    sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert {*sizes} == {
        "launch.svg",
        "failure.svg",
        "failure.gif",
        "kill.svg",
        "kill.gif",
        "launch.gif",
        "top.svg",
        "dashboard.png",
        "experiment.png",
        "report.png",
    }
    assert all(size < LARGEST[Path(name).suffix] for name, size in sizes.items()), sizes
    top = "\n".join(ElementTree.parse(directory / "top.svg").getroot().itertext())
    for shown in ("127.0.0.3", "gpt-small_", "LEFT", "quit"):
        assert shown in top, top
    with Browser(tmp_path) as browser:
        pictures = {path: browser.colors(path) for path in directory.glob("*.png")}
    for path, colors in pictures.items():
        paper = colors[bytes((255, 255, 255))]
        assert paper > 10_000 and colors.total() - paper > 10_000, path
        lines = sum(count for each, count in colors.items() if near(each, BLUE))
        assert lines > 300 or path.name == "dashboard.png", path
    for name, words in {"launch": LAUNCHED, "failure": FAILED, "kill": KILLED}.items():
        check_film(directory / f"{name}.svg", words, 3)


@pytest.mark.cluster
def test_film_shows_real_launch(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text(f"```python train.py\n{TALKS}```\n")
    monkeypatch.setattr(pictures, "START", tmp_path / "page.md")
    pictures.launch(head, tmp_path / "launch.svg")
    check_film(tmp_path / "launch.svg", LAUNCHED)
