import contextlib
import fcntl
import io
import os
import re
import struct
import termios
import threading
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO
from unittest import mock

import pyte
import pytest
from hypothesis import given, settings

from orchestrator.cli import run
from orchestrator.head.screen import output
from orchestrator.head.screen import screen as screen_module
from orchestrator.head.screen.lines import fit_columns
from orchestrator.head.screen.log_reader import LogFile, last_words
from orchestrator.head.screen.screen import Display, Screen
from tests.head.screen.test_lines import BYTES
from tests.head.screen.test_log_reader import append, log_in


def piped(logs: list[LogFile], out: TextIO, **options: object) -> Screen:
    return Screen(logs, out, **{"tty": False, "color": False, "quiet": False, **options})  # type: ignore[arg-type]


def pump_all(screen: Screen) -> None:
    while screen.pump():
        pass


def shown(logs: list[LogFile], **options: object) -> list[str]:
    """The lines that a pipe gets, with everything already in the logs."""
    out = io.StringIO()
    screen = piped(logs, out, **options)
    pump_all(screen)
    screen.close()
    return out.getvalue().splitlines()


@pytest.fixture
def two_nodes(tmp_path: Path) -> list[LogFile]:
    logs = [log_in(tmp_path, 0), log_in(tmp_path, 1)]
    append(logs[0], ("-", b"torchrun\n"), ("0", b"a\n"), ("1", b"\x1b[31mb\n"))
    append(logs[1], ("2", b"c\n"), ("3", b"d\n"))
    return logs


ALL = ["node0       | torchrun", "node0 rank0 | a", "node0 rank1 | b"]
ALL += ["node1 rank2 | c", "node1 rank3 | d"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"ranks": 4}, ALL),
        ({"node": 1}, ALL[3:]),
        ({"rank": 1}, ALL[2:3]),
        ({"node": 1, "rank": 1}, []),
        ({"rank": 1, "ranks": 16}, ["node0 rank1  | b"]),
        ({"quiet": True}, []),
    ],
)
def test_pipe_gets_prefixed_lines(
    two_nodes: list[LogFile], options: dict[str, object], lines: list[str]
) -> None:
    assert shown(two_nodes, **options) == lines


GLOO = b"""\
[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 1
[Gloo] Rank 0 is NOT connected to: [1]
"""


def test_known_torch_noise_is_hidden(tmp_path: Path) -> None:
    log = log_in(tmp_path, 0)
    where = b"[W1121 23:27:34.165466818 socket.cpp:207] [c10d] "
    cannot = b"The hostname of the client socket cannot be retrieved. err=-3"
    profiler = b"USDT:2026-11-21 23:40:16 7:7 SyncActivityProfilerHandler.cpp:52] profiler_start"
    append(
        log,
        ("-", where + cannot + b"\n" + where + b"another warning\n"),
        ("0", b"before\n" + profiler + b"\nthe USDT: rate\n" + cannot[:20] + b"\n"),
        ("~", b"recvValueWithTimeout failed on SocketImpl\n"),
        ("0", GLOO + b"after is NOT connected to: [1]\n"),
    )
    lines = shown([log], ranks=1)
    assert [line.partition("| ")[2] for line in lines] == [
        (where + b"another warning").decode(), "before", "the USDT: rate", cannot[:20].decode(),
        "after is NOT connected to: [1]",
    ]  # fmt: skip


def test_pipe_gets_finished_lines_and_last_state_of_bar(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    out = io.StringIO()
    screen = piped([log], out)
    for data in (b"\r 10%", b"\r 20%", b"\r 30%\nhel", b"lo\n\r 1%", b"\r 2%"):
        append(log, ("0", data))
        pump_all(screen)
    assert out.getvalue() == "node0 rank0 |  30%\nnode0 rank0 | hello\n"
    screen.close()
    screen.close()
    assert out.getvalue().splitlines()[2:] == ["node0 rank0 |  2%"]


def test_say_is_shown_if_quiet_and_cleaned() -> None:
    out = io.StringIO()
    piped([], out, quiet=True).say("node 1: no word\x1b[2J\nfor 10 s")
    assert out.getvalue() == "node 1: no word\nfor 10 s\n"


@pytest.mark.cluster
def test_skip_to_shows_new_lines_alone(two_nodes: list[LogFile]) -> None:
    out = io.StringIO()
    screen = piped(two_nodes, out)
    screen.skip_to({})
    append(two_nodes[1], ("3", b"new\n"))
    pump_all(screen)
    assert out.getvalue() == "node1 rank3 | new\n"


@settings(max_examples=40, deadline=None)
@given(data=BYTES)
def test_pipe_gets_no_control_character(data: bytes) -> None:
    screen = piped([], out := io.StringIO())
    screen.say(data.decode("utf-8", "replace"))
    assert not [c for c in out.getvalue() if unicodedata.category(c) == "Cc" and c != "\n"]


@pytest.mark.cluster
def test_closed_pipe_ends_output_alone(
    two_nodes: list[LogFile],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = os.fdopen(writer, "w")
    screen = piped(two_nodes, out)
    assert not screen.broken
    screen.pump()
    assert screen.broken
    append(two_nodes[0], ("0", b"more\n"))
    assert not screen.pump()
    screen.say("words")
    screen.close()
    # Text that the reader has not taken is written again with the next text, and fails again.
    assert not output.pass_on("one\n", out)
    assert not output.pass_on("two\n", out)
    with pytest.raises(BrokenPipeError):  # what Python still held for it
        out.close()


class Terminal:
    """A real pty; `pyte` plays the terminal on its other side, so tests see what a user sees."""

    def __init__(self, columns: int = 40, height: int = 24) -> None:
        self.master, slave = os.openpty()
        self.out = os.fdopen(slave, "w", encoding="utf-8")
        self.screen = pyte.HistoryScreen(columns, height, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        self.resize(columns, height)

    def resize(self, columns: int, height: int) -> None:
        fcntl.ioctl(self.out, termios.TIOCSWINSZ, struct.pack("HHHH", height, columns, 0, 0))
        self.screen.resize(height, columns)

    def read(self) -> bytes:
        os.set_blocking(self.master, False)
        data = b""
        while True:
            try:
                data += os.read(self.master, 1 << 16)
            except BlockingIOError:
                break
        self._stream.feed(data)
        return data

    def lines(self) -> list[str]:
        """All there is, what scrolled away included, without the empty rows at the bottom."""
        self.read()
        columns = range(self.screen.columns)
        above = ["".join(row[x].data for x in columns) for row in self.screen.history.top]
        rows = [row.rstrip() for row in (*above, *self.screen.display)]
        return "\n".join(rows).rstrip().split("\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    yield terminal
    terminal.out.close()
    os.close(terminal.master)


def on_tty(logs: list[LogFile], terminal: Terminal, **options: object) -> Screen:
    return piped(logs, terminal.out, **{"tty": True, **options})


def test_bars_move_below_lines(tmp_path: Path, terminal: Terminal) -> None:
    logs = [log_in(tmp_path, 0), log_in(tmp_path, 1)]
    screen = on_tty(logs, terminal)
    append(logs[0], ("0", "\r 10%|█▏  |".encode()))
    append(logs[1], ("1", "\r 20%|██  |".encode()))
    pump_all(screen)
    assert terminal.lines() == ["node0 rank0 |  10%|█▏  |", "node1 rank1 |  20%|██  |"]

    append(logs[0], ("-", b"a line\nand another\n"), ("0", "\r 50%|███ |".encode()))
    pump_all(screen)
    screen.say("node 1: no word for 10 s")
    assert terminal.lines() == [
        "node0       | a line",
        "node0       | and another",
        "node 1: no word for 10 s",
        "node0 rank0 |  50%|███ |",
        "node1 rank1 |  20%|██  |",
    ]

    append(logs[1], ("1", "\r100%|████|\n".encode()))
    pump_all(screen)
    assert terminal.lines()[3:] == ["node1 rank1 | 100%|████|", "node0 rank0 |  50%|███ |"]

    screen.close()
    screen.say("done")
    assert terminal.lines()[3:] == [
        "node1 rank1 | 100%|████|",
        # The bar's last state is shown as a line.
        "node0 rank0 |  50%|███ |",
        "done",
    ]


def test_lines_and_bars_survive_scrolling(tmp_path: Path, terminal: Terminal) -> None:
    log = log_in(tmp_path)
    screen = on_tty([log], terminal)
    with mock.patch.object(screen_module, "FRAME_SECONDS", 0):
        for step in range(60):
            words = f"line {step}\n".encode()
            bars = [(str(rank), b"\r at %d" % step) for rank in range(3)]
            append(log, ("-", words), *bars)
            pump_all(screen)
            terminal.read()
    expected = [f"node0       | line {step}" for step in range(60)]
    assert terminal.lines()[1:] == expected[1:] + [f"node0 rank{r} |  at 59" for r in range(3)]


@pytest.mark.parametrize(("height", "bars"), [(50, 7), (10, 4), (3, 1)])
def test_many_bars_are_limited_and_counted(
    tmp_path: Path, terminal: Terminal, height: int, bars: int
) -> None:
    terminal.resize(40, height)
    log = log_in(tmp_path)
    screen = on_tty([log], terminal, ranks=12)
    append(log, *((str(rank), b"\r 5%") for rank in range(12)))
    pump_all(screen)
    assert terminal.lines() == [
        *(f"node0 rank{rank}  |  5%" for rank in range(bars)),
        f"(+{12 - bars} more)",
    ]


def test_stale_bars_give_way_to_moving_ones(tmp_path: Path, terminal: Terminal) -> None:
    log = log_in(tmp_path)
    screen = on_tty([log], terminal)
    with mock.patch.object(screen_module, "_STALE_SECONDS", 0.1):
        append(log, *((stream, b"\r 5%") for stream in ("2", "0", "-")))
        pump_all(screen)
        bars = ["node0       |  5%", "node0 rank0 |  5%", "node0 rank2 |  5%"]
        assert terminal.lines() == bars
        time.sleep(0.15)
        append(log, ("2", b"\r 6%"))
        pump_all(screen)
    assert terminal.lines() == ["node0 rank2 |  6%", *bars[:2]]
    screen.close()
    assert terminal.lines() == [*bars[:2], "node0 rank2 |  6%"]


def test_screen_paints_at_most_20_times_a_second(tmp_path: Path, terminal: Terminal) -> None:
    log = log_in(tmp_path)
    screen = on_tty([log], terminal)
    begun, paintings, step = time.monotonic(), 0, 0
    while time.monotonic() - begun < 0.5:
        append(log, ("0", b"\r%d" % step))
        paintings += screen.pump()
        step += 1
    assert 1 < paintings <= 11
    assert terminal.lines() == [f"node0 rank0 | {step - 1}"]


@pytest.mark.slow
def test_terminal_far_behind_skips_and_names_log(tmp_path: Path, terminal: Terminal) -> None:
    terminal.resize(200, 24)
    logs = [log_in(tmp_path, 0), log_in(tmp_path, 1)]
    screen = on_tty(logs, terminal)
    append(logs[0], ("0", b"a line cut "))
    pump_all(screen)
    append(logs[0], ("0", b"".join(b"line %06d\n" % i for i in range(1_000_000))))  # 12 MB
    append(logs[1], ("1", b"few words\n"))
    pumping = threading.Thread(target=pump_all, args=[screen], daemon=True)
    pumping.start()
    while pumping.is_alive():
        terminal.read()
    shown = terminal.lines()
    assert shown[0] == f"node0: 11.4 MiB not shown, in full in {logs[0].text}"
    lines = [line for line in shown if "line" in line]
    assert lines[-1] == "node0 rank0 | line 999999"
    assert 5000 < len(lines) <= (64 << 10) / 12
    assert all(re.fullmatch(r"node0 rank0 \| line \d{6}", line) for line in lines)
    assert shown[-1] == "node1 rank1 | few words"


@pytest.mark.cluster
def test_colour_marks_node_and_keeps_colours_of_line(
    two_nodes: list[LogFile], terminal: Terminal
) -> None:
    append(two_nodes[1], ("3", b"\x1b[31mred\n"), ("3", b"\r\x1b[32mgreen bar"))
    pump_all(on_tty(two_nodes, terminal, color=True, node=1))
    assert terminal.read().decode().split("\r\n") == [
        "\x1b[32mnode1 rank2 | \x1b[0mc",
        "\x1b[32mnode1 rank3 | \x1b[0md",
        "\x1b[32mnode1 rank3 | \x1b[0m\x1b[31mred\x1b[0m",
        "\x1b[32mnode1 rank3 | \x1b[0mgreen bar",
    ]


@pytest.mark.cluster
def test_full_disk_behind_pipe_is_reported(
    two_nodes: list[LogFile], capsys: pytest.CaptureFixture[str]
) -> None:
    output.complain_once.cache_clear()
    with Path("/dev/full").open("w") as out:
        screen = piped(two_nodes, out)
        screen.pump()
        assert screen.broken
        assert not run.output_is_whole(), "the exit code would say that all was shown"
        with contextlib.suppress(OSError):
            out.close()
    assert "standard output cannot be written: No space left" in capsys.readouterr().err
    output.complain_once.cache_clear()


@pytest.mark.cluster
def test_closed_terminal_does_not_end_job(
    two_nodes: list[LogFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    screen = on_tty(two_nodes, terminal)
    os.close(terminal.master)
    screen.pump()
    assert screen.broken
    with pytest.raises(OSError, match="Input/output"):
        terminal.out.close()


FITS = [("abc", 2, "ab"), ("abc", 0, ""), ("abc", -1, ""), ("漢字", 4, "漢字"), ("漢字", 3, "漢")]
FITS += [("e\u0301e\u0301", 2, "e\u0301e\u0301"), ("██", 1, "█")]


@pytest.mark.parametrize(("text", "columns", "fitted"), FITS)
def test_fit_cuts_text_to_columns(text: str, columns: int, fitted: str) -> None:
    assert fit_columns(text, columns) == fitted


TRACE = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nKeyError: 1\n'


def test_tracebacks_of_many_ranks_are_folded_to_count(tmp_path: Path) -> None:
    logs = [log_in(tmp_path, node) for node in range(8)]
    for node, log in enumerate(logs):
        for rank in range(8 * node, 8 * node + 8):
            trace = b"".join(b"[rank%d]: " % rank + line + b"\n" for line in TRACE.splitlines())
            append(log, (str(rank), b"step\n" + trace))
    out = io.StringIO()
    screen = piped(logs, out, folds=True)
    pump_all(screen)
    assert screen.waits
    assert screen.close(fold=True) == 64
    assert [line.partition("| ")[2] for line in out.getvalue().splitlines()] == ["step"] * 64
    assert sum("KeyError" in line for line in shown(logs)) == 64, "a command for logs shows all"


def test_traceback_of_rank_that_continues_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now[0])
    log = log_in(tmp_path, 0)
    out = io.StringIO()
    screen = piped([log], out, folds=True)
    append(log, ("0", b"epoch 1\n" + TRACE[:20]), ("0", TRACE[20:]))
    pump_all(screen)
    screen.tick()
    assert out.getvalue() == "node0 rank0 | epoch 1\n"
    now[0] += 1.0
    append(log, ("0", b"epoch 2\n"))
    pump_all(screen)
    now[0] += 1.1
    screen.tick()
    told = [line.partition("| ")[2] for line in out.getvalue().splitlines()]
    assert told == ["epoch 1", *TRACE.decode().splitlines(), "epoch 2"]
    assert not screen.waits
    append(log, ("0", TRACE))
    pump_all(screen)
    now[0] += 10.1
    screen.tick()
    assert screen.close(fold=True) == 0 and out.getvalue().count("KeyError") == 2


def test_line_half_received_is_whole_for_next_screen(tmp_path: Path) -> None:
    log = log_in(tmp_path, 0)
    append(log, ("0", b"whole\nhal"))
    first = piped([log], io.StringIO())
    pump_all(first)
    first.close()
    append(log, ("0", b"f\nlast\n"))
    out = io.StringIO()
    second = piped([log], out)
    second.skip_to(first.positions)
    pump_all(second)
    assert out.getvalue().splitlines() == ["node0 rank0 | half", "node0 rank0 | last"]


def test_last_words_of_crash_are_frames_of_program(tmp_path: Path) -> None:
    log = log_in(tmp_path, 0)
    append(
        log,
        ("0", b"""before
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/x/orchestrator/node/job/ranks/rank.py", line 190 in tell_collectives

Current thread 0x00007f02 (most recent call first):
  File "/w/train.py", line 3 in inner
  File "/w/train.py", line 9 in <module>
  File "/x/orchestrator/node/job/ranks/rank.py", line 300 in run_python
  File "/p/torch/distributed/run.py", line 1 in main
"""),
    )  # fmt: skip
    assert last_words(log, 0) == [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f02 (most recent call first):",
        '  File "/w/train.py", line 3 in inner',
        '  File "/w/train.py", line 9 in <module>',
    ]


@pytest.mark.cluster
def test_muted_display_shows_what_preceded_failure(two_nodes: list[LogFile]) -> None:
    """However far behind it is then, and nothing that only echoes the failure."""
    out = io.StringIO()
    display = Display(piped(two_nodes, out))
    display.mute()
    append(two_nodes[0], ("0", b"connection closed by peer\n"))
    display.mute()
    display.start()
    display.finish()
    texts = [line.partition("| ")[2] for line in out.getvalue().splitlines()]
    assert sorted(texts) == ["a", "b", "c", "d", "torchrun"]
