"""The dashboard as it is started and seen: the command, a real Chromium, keys alone."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser
from tests.launching import BIN, Command
from tests.views.report.stories import experiment, line
from tests.views.report.test_browser import near, pixels

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
    (tmp_path / "nodes.txt").write_text("127.0.0.1:1\n")  # where nobody listens
    words = [str(BIN / "orchestrator"), "dashboard", "--port", "0", "--experiments", str(root)]
    words += ["--nodes", "nodes.txt"]
    command = Command(words, tmp_path, {})
    try:
        yield root, command.wait_for("open (http://.*)")[1]
        command.interrupt()
        assert command.finish() in (0, 130), command.text
        assert "Traceback" not in command.text
    finally:
        command.process.kill()


def test_the_command_line_of_the_browser_has_no_token(tmp_path: Path) -> None:
    """All users of this machine can read it, and the token shows and stops jobs."""
    (program := tmp_path / "program").write_text('#!/bin/sh\necho "opens $1"\n')
    program.chmod(0o755)
    home = tmp_path / "home of ours"
    words = [str(BIN / "orchestrator"), "dashboard", "--port", "0", "--open"]
    command = Command(
        words, tmp_path, {"BROWSER": str(program), "ORCHESTRATOR_HOME": str(home)}, anew=True
    )
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


def test_live_by_keys_in_light_and_dark(served: tuple[Path, str], tmp_path: Path) -> None:
    root, url = served
    with Browser(tmp_path) as browser:
        browser.look(390, 800, dark=True)
        browser.open(url)
        browser.until("document.documentElement.dataset.rows == 2")
        every_column_says_something_and_is_seen(browser)
        sort_group_and_hide(browser)
        assert "token" not in browser.eval("location.href")
        assert browser.eval("document.documentElement.scrollWidth") == 390
        experiment(root / "new_20260103_000000", steps=0, **RUNNING)
        browser.until("document.documentElement.dataset.rows == 3")
        browser.until("document.getElementById('filter').focus() || true")
        browser.type("gpt")
        browser.until("document.documentElement.dataset.rows == 1")
        for _ in range(9):
            browser.press("Tab")
            if browser.eval("document.activeElement.tagName") == "A":
                break
        browser.press("Enter")
        browser.until(f"location.pathname == '/experiment/{RUN}'")
        browser.until("document.documentElement.dataset.drawn > 6")
        assert browser.eval("document.documentElement.scrollWidth") == 390
        see_it_grow(browser, root / RUN)
        search_and_stop(browser)
        lose_the_connection(browser)
        lose_the_server(browser)
        for dark, color, paper in (
            (True, (0x91, 0xBC, 0xFD), (0x0F, 0x13, 0x18)),
            (False, (0x00, 0x4C, 0xFF), (255, 255, 255)),
        ):
            browser.look(1000, 900, dark=dark)
            browser.eval("document.getElementById('chart-0').scrollIntoView()")
            colors = pixels(browser.picture(tmp_path / "picture.png"))
            assert colors[bytes(paper)] > 10_000
            assert sum(count for each, count in colors.items() if near(each, color)) > 300
        browser.open(f"{url.partition('/?')[0]}/compare?e={RUN}&e=bert_20260101_000000")
        browser.until("document.documentElement.dataset.drawn > 6")
        assert "What differs" in browser.eval("document.body.innerText")
        browser.look(390, 800)
        browser.open(f"{url.partition('/?')[0]}/cluster")
        browser.until("document.documentElement.dataset.nodes == 1")
        browser.eval("document.querySelector('#nodes button').click()")
        browser.until("document.querySelector('.more').innerText.includes('orchestrator doctor')")
        assert browser.eval("document.querySelector('#nodes button').ariaExpanded") == "true"
        assert "0 of 1 node" in browser.eval("document.getElementById('summary').textContent")
        assert browser.eval("document.documentElement.scrollWidth") == 390
        assert browser.console == []


NAMES = (
    "[...document.querySelectorAll('#list td.name a')].map(a => a.textContent.slice(0, 4)).join()"
)


def every_column_says_something_and_is_seen(browser: Browser) -> None:
    """A table that is wider than the screen would be cut; columns go, until the rest fits.

    At which width one goes depends on the fonts of this machine, and so no width is expected.
    """
    edge = "document.getElementById('list').parentElement"
    fits = f"{edge}.scrollWidth <= {edge}.clientWidth"
    columns = "document.querySelectorAll('#list thead th').length"
    always = len(("choose", "experiment", "state", "step", "loss", "started"))
    counts = []
    for width in (650, 800, 950, 1100, 2000):
        browser.look(width, 800)
        browser.until(f"innerWidth == {width} && {columns} && ({fits} || {columns} == {always})")
        counts.append(browser.eval(columns))
    assert counts == sorted(counts) and always <= counts[0] < counts[-1]
    browser.until(fits)
    assert browser.eval(
        "document.querySelectorAll('#columns input:checked').length"
    ) == browser.eval(columns) - len(("choose", "experiment"))
    texts = browser.eval(
        "[...document.querySelectorAll('#list tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert all("".join(column) for column in list(zip(*texts, strict=True))[1:])
    browser.look(390, 800, dark=True)


def sort_group_and_hide(browser: Browser) -> None:
    """What is chosen stays when the page is opened again."""
    click = (
        "[...document.querySelectorAll('#list th button')].find(b => b.textContent == '{}').click()"
    )
    browser.eval(click.format("step"))
    assert browser.eval(NAMES) == "gpt_,bert"  # the most first
    browser.eval("document.querySelector('[aria-sort] button').click()")
    assert browser.eval(NAMES) == "bert,gpt_"
    browser.eval(
        "const group = document.getElementById('group'); group.value = 'state'; group.onchange()"
    )
    assert browser.eval("[...document.querySelectorAll('tr.group')].length") == 2
    browser.eval("document.querySelector('[data-name^=bert]').click()")
    browser.eval("document.getElementById('hide').click(); window.old = true; location.reload()")
    browser.until("!window.old && document.documentElement.dataset.rows == 1")
    assert browser.eval(NAMES) == "gpt_"
    browser.eval("document.getElementById('unhide').click()")
    browser.eval(
        "document.getElementById('group').value = ''; document.getElementById('group').onchange()"
    )
    browser.until("document.documentElement.dataset.rows == 2")


def see_it_grow(browser: Browser, path: Path) -> None:
    (log,) = (path / "logs").glob("node_0_*.txt")
    with log.open("a") as file:
        file.write("<b>now</b>\n")
    browser.until("document.getElementById('log').textContent.includes('<b>now</b>')")
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


SERVER = """
window.made = [];
window.EventSource = class {
  constructor(url) { this.url = url; this.readyState = 1; this.hear = {}; made.push(this); }
  addEventListener(name, take) { this.hear[name] = take; }
  close() { this.readyState = 2; }
  say(name, data) { this.hear[name]({ data: JSON.stringify(data) }); }
  tell() { this.onopen(); this.say("lines", { next: 1, left_out: 0, lines: [["0", "one line"]] }); }
};
document.dispatchEvent(new Event("visibilitychange"));
made[0].tell();
made[0].onerror();
made[0].tell();
"""


def lose_the_server(browser: Browser) -> None:
    """What is asked for then is not waited for without end."""
    browser.ask("Network.enable")
    cut = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.ask("Network.emulateNetworkConditions", offline=True, **cut)
    browser.eval("document.getElementById('search').requestSubmit()")
    browser.until("document.getElementById('found').textContent.startsWith('not searched')")
    browser.ask("Network.emulateNetworkConditions", offline=False, **cut)
    browser.ask("Network.disable")
    browser.console.clear()  # the browser notes each request that failed


def lose_the_connection(browser: Browser) -> None:
    """A browser connects again by itself, and gives up where the answer is an error."""
    browser.eval(SERVER)
    assert browser.eval("made.length") == 1
    assert browser.eval("document.getElementById('log').innerText.trim()") == "rank 0 | one line"
    assert browser.eval("document.getElementById('alive').textContent") == "live"
    browser.eval("made[0].readyState = 2; made[0].onerror()")
    assert "open its new address" in browser.eval("document.getElementById('alive').textContent")
    browser.until("made.length == 2")
    browser.eval("made[1].tell()")
    assert browser.eval("document.getElementById('log').innerText.trim()") == "rank 0 | one line"


def search_and_stop(browser: Browser) -> None:
    browser.until("document.getElementById('word').focus() || true")
    browser.type("HELLO FROM")
    browser.press("Enter")
    browser.until("document.documentElement.dataset.hits == 2")
    browser.until("document.getElementById('stop').focus() || true")
    browser.press("Enter")
    browser.until("document.getElementById('ask').open")
    assert browser.eval("document.activeElement.textContent") == "Leave it running"
    browser.press("Enter")
    browser.until("!document.getElementById('ask').open")
    assert browser.eval("document.getElementById('stopping').hidden")
    browser.press("Enter")
    browser.until("document.getElementById('ask').open")
    browser.until("document.querySelector('#ask button').focus() || true")
    browser.press("Enter")
    # This login launched no such job, and so its record is not believed.
    browser.until("document.getElementById('stopping').textContent.includes('not launched by')")
