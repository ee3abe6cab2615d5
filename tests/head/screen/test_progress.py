"""The one line that moves: what fits on it, and what is printed above it."""

import sys
import threading
from pathlib import Path

import pytest

from orchestrator.head.connect import fleet
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.events import say
from orchestrator.head.screen.lines import clean_line
from orchestrator.head.screen.progress import ProgressBar, counted_work, join_parts
from tests.head.screen.test_log_reader import append, log_in
from tests.head.screen.test_screen import Terminal, on_tty, pump_all, terminal
from tests.node.running import wait_until

__all__ = ["terminal"]
PARTS = [
    ("4/4 nodes", styles.DONE, 1),
    ("step 214/1740", "", 0),
    ("loss 0.016", "", 2),
    ("1.3k/s", "", 3),
    ("7 min 12 s left", "", 3),
    ("attempt 2/4", styles.WARNING, 5),
    ("d detach", styles.DIM, 6),
]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (200, " · ".join(text for text, *_ in PARTS)),
        (78, "4/4 nodes · step 214/1740 · loss 0.016 · 1.3k/s · 7 min 12 s left"),
        (60, "4/4 nodes · step 214/1740 · loss 0.016 · 7 min 12 s left"),
        (30, "4/4 nodes · step 214/1740"),
        (8, "step 214"),
    ],
)
def test_joined_drops_least_important_part_first(columns: int, line: str) -> None:
    shown = join_parts(PARTS, columns)
    assert clean_line(shown) == line and len(clean_line(shown)) <= columns


def test_bar_shows_speed_time_left_and_nodes() -> None:
    progress = ProgressBar("sending", 4_000_000, nodes=3)
    progress.began -= 10.0
    progress.add(1_000_000)
    progress.node_done()
    line = progress.line(100)
    assert line.startswith("sending #####--------------- 25% · 1 MB of 4 MB · 100 kB/s · 30 s left")
    assert line.endswith(" · 1/3 nodes") and len(progress.line(30)) == 30


def test_counted_shows_nodes_as_they_answer(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.out)
    monkeypatch.setenv("COLUMNS", "40")
    gate = threading.Event()

    def answer(node: int) -> int:
        assert node or gate.wait(60)
        return node

    with counted_work("connecting", answer, [0, 1, 2]) as counting:
        waiting = threading.Thread(target=fleet.map_parallel, args=([0, 1, 2], counting))
        waiting.start()
        wait_until(lambda: "connecting 2/3 nodes" in terminal.lines()[-1])
        gate.set()
        waiting.join()
    assert terminal.lines() == [""]


def test_messages_stand_above_status_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.out)
    monkeypatch.setattr(sys, "stdout", terminal.out)
    monkeypatch.setattr(styles, "_chosen", [False])
    output.set_status_line("connecting 1/2")
    say("one")
    output.complain("two")
    assert terminal.lines() == ["orchestrator: one", "two", "connecting 1/2"]
    output.set_status_line("")
    say("three")
    assert terminal.lines() == ["orchestrator: one", "two", "orchestrator: three"]


def test_log_lines_and_bars_stand_above_job_line(tmp_path: Path, terminal: Terminal) -> None:
    log = log_in(tmp_path, 0)
    screen = on_tty([log], terminal)
    step = iter(range(100))
    screen.status = lambda columns: f"step {next(step)} of {columns} columns"
    screen.tick()
    append(log, ("0", b"a\n" * 30 + b"\r 10%"))
    pump_all(screen)
    assert terminal.lines()[-3:] == [
        "node0 rank0 | a",
        "node0 rank0 |  10%",
        "step 0 of 39 columns",
    ]
    terminal.resize(60, 24)
    screen.tick()
    screen.say("orchestrator: word")
    assert terminal.lines()[-3:] == [
        "orchestrator: word",
        "node0 rank0 |  10%",
        "step 1 of 59 columns",
    ]
    screen.close()
    lines = terminal.lines()
    assert lines[-2:] == ["orchestrator: word", "node0 rank0 |  10%"]
    assert lines.count("node0 rank0 | a") == 30 and not any("columns" in line for line in lines)
