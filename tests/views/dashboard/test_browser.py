"""The dashboard as it is started and seen: the command, a real Chromium, keys alone."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser
from tests.launching import BIN, Command
from tests.views.report.reports import experiment, line
from tests.views.report.test_browser import near

pytestmark = pytest.mark.browser

RUNNING: dict[str, Any] = {"state": "running", "ended": None, "exit_code": None}
RUN = "gpt_20260102_000000"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory of experiments, and the address that the command prints for it."""
    root = tmp_path / "of a team"
    root.mkdir(mode=0o700)
    experiment(root / "bert_20260101_000000", steps=300)
    experiment(root / RUN, steps=400, **RUNNING)
    words = [str(BIN / "orchestrator"), "dashboard", "--port", "0", "--experiments", str(root)]
    command = Command(words, tmp_path, {})
    try:
        yield root, command.wait_for("open (http://.*)")[1]
        command.interrupt()
        assert command.finish() in (0, 130), command.text
        assert "Traceback" not in command.text
    finally:
        command.process.kill()


def test_browser_command_line_has_no_token(tmp_path: Path) -> None:
    """All users of this machine can read it, and the token shows and stops jobs."""
    (program := tmp_path / "program").write_text('#!/bin/sh\necho "opens $1"\n')
    program.chmod(0o755)
    home = tmp_path / "home of ours"
    words = [str(BIN / "orchestrator"), "dashboard", "--port", "0", "--open"]
    command = Command(words, tmp_path, {"BROWSER": str(program), "ORCHESTRATOR_HOME": str(home)})
    try:
        said = command.wait_for("opens (.*)")[1]
        (page,) = home.glob("dashboard-*.html")
        assert "token" not in said and stat.S_IMODE(page.stat().st_mode) == 0o600
        with Browser(tmp_path) as browser:
            browser.open(said)
            browser.until("document.documentElement.dataset.rows == 0")
            assert "token" not in browser.eval("location.href")
        command.interrupt()
        assert command.finish() in (0, 130) and not page.exists(), command.text
    finally:
        command.process.kill()


def test_page_updates_and_works_by_keys(served: tuple[Path, str], tmp_path: Path) -> None:
    root, url = served
    with Browser(tmp_path) as browser:
        browser.look(390, 800, dark=True)
        browser.open(url)
        browser.until("document.documentElement.dataset.rows == 2")
        sort(browser)
        assert "token" not in browser.eval("location.href")
        assert browser.eval("document.documentElement.scrollWidth") == 390
        experiment(root / "new_20260103_000000", steps=0, **RUNNING)
        browser.until("document.documentElement.dataset.rows == 3")
        browser.until("document.getElementById('filter').focus() || true")
        browser.type("gpt")
        browser.until("document.documentElement.dataset.rows == 1")
        for _ in range(20):
            browser.press("Tab")
            if browser.eval("document.activeElement.tagName") == "A":
                break
        browser.press("Enter")
        browser.until(f"location.pathname == '/experiment/{RUN}'")
        browser.until("document.documentElement.dataset.drawn > 6")
        assert browser.eval("document.documentElement.scrollWidth") == 390
        see_it_grow(browser, root / RUN)
        stop(browser)
        for dark, color, paper in (
            (True, (0x91, 0xBC, 0xFD), (0x0F, 0x13, 0x18)),
            (False, (0x00, 0x4C, 0xFF), (255, 255, 255)),
        ):
            browser.look(1000, 900, dark=dark)
            browser.eval("document.getElementById('chart-0').scrollIntoView()")
            colors = browser.colors(browser.picture(tmp_path / "picture.png"))
            assert colors[bytes(paper)] > 10_000
            assert sum(count for each, count in colors.items() if near(each, color)) > 300
        browser.open(url.partition("/?")[0])
        browser.until("document.documentElement.dataset.rows == 3")
        browser.eval("document.querySelectorAll('#list input').forEach(box => box.click())")
        browser.until("document.documentElement.dataset.looks > 1")
        browser.eval("document.querySelector('form button').click()")
        browser.until("location.pathname == '/compare'")
        browser.until("document.documentElement.dataset.drawn > 6")
        assert "What differs" in browser.eval("document.body.innerText")
        assert browser.console == []
        browser.open(url.partition("/?")[0])
        lose_the_server(browser)


def lose_the_server(browser: Browser) -> None:
    """It is said that the server is gone, and that it is there again."""
    browser.until("document.getElementById('alive').textContent == 'live'")
    browser.ask("Network.enable")
    cut = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.ask("Network.emulateNetworkConditions", offline=True, **cut)
    browser.until("document.getElementById('alive').textContent.includes('its new address')")
    browser.ask("Network.emulateNetworkConditions", offline=False, **cut)
    browser.until("document.getElementById('alive').textContent == 'live'")


NAMES = (
    "[...document.querySelectorAll('#list td.name a')].map(a => a.textContent.slice(0, 4)).join()"
)


def sort(browser: Browser) -> None:
    click = (
        "[...document.querySelectorAll('#list th button')].find(b => b.textContent == 'step')"
        ".click()"
    )
    browser.eval(click)
    assert browser.eval(NAMES) == "bert,gpt_"
    browser.eval(click)
    assert browser.eval(NAMES) == "gpt_,bert"
    looks = browser.eval("document.documentElement.dataset.looks")
    browser.until(f"document.documentElement.dataset.looks > {looks or 0}")
    assert browser.eval(NAMES) == "gpt_,bert"
    assert browser.eval("document.querySelector('[aria-sort]').textContent") == "step"


def stop(browser: Browser) -> None:
    browser.eval("document.querySelector('nav summary').click()")
    browser.eval("document.querySelector('nav form button').click()")
    # This login launched no such job, and so its record is not believed.
    browser.until("document.getElementById('stopping').textContent.includes('not launched by')")
    browser.until("document.documentElement.dataset.drawn > 6")


def see_it_grow(browser: Browser, path: Path) -> None:
    (log,) = (path / "logs").glob("node_0_*.txt")
    with log.open("a") as file:
        file.write("<b>now</b>\n")
    browser.until("document.getElementById('logs').textContent.includes('<b>now</b>')")
    browser.eval(MOUSE)
    browser.eval("zoom(0.5, 0.9)")
    browser.until("first() > 150")
    with (path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(0, 401, 2)) + "\n")
    browser.until("document.getElementById('heading').innerText.includes('401')")
    browser.until("document.querySelector('#chart-0 [role=img]').ariaLabel.includes('at step 401')")
    # The chart is the one that it was, and shows what was chosen in it.
    assert browser.eval("over === document.querySelector('#chart-0 .u-over')")
    assert 150 < browser.eval("first()") < 300


MOUSE = """
window.over = document.querySelector('#chart-0 .u-over');
const mouse = (kind, share, on = over) => {
  const { left, top, width, height } = over.getBoundingClientRect();
  const at = { clientX: left + share * width, clientY: top + height / 2, movementX: 1 };
  on.dispatchEvent(new MouseEvent(kind, { ...at, bubbles: true, button: 0, buttons: 1 }));
};
window.zoom = (from, to) => {
  over.scrollIntoView();
  mouse('mouseenter', from);
  mouse('mousemove', from);
  mouse('mousedown', from);
  mouse('mousemove', to);
  mouse('mouseup', to, document);
};
// The step at the left edge of what is shown.
window.first = () => {
  mouse('mouseenter', 0.01);
  mouse('mousemove', 0.01);
  return +document.querySelector('#chart-0 .at').textContent.replace('step ', '');
};
"""
