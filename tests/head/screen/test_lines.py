import re
import tracemalloc
import unicodedata
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.head.screen import lines as screen_lines
from orchestrator.head.screen.lines import CONTINUED, LineSplitter, clean_line

RESET = "\x1b[0m"


def lines_of(data: bytes, color: bool = False) -> list[str]:
    splitter = LineSplitter(color)
    return splitter.feed(data) + splitter.flush()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"\n\n", ["", ""]),
        (b"no newline at the end", ["no newline at the end"]),
        (b"dos\r\nline ends\r\n", ["dos", "line ends"]),
        (b"\r  0%|\r 50%|\r100%|done\nnext\n", ["100%|done", "next"]),
        (b"  0%\r 50%\r100%\r\nnext\n", ["100%", "next"]),
        (b"  0%\r 50%\r", [" 50%"]),
        # A bar that erased itself leaves no line.
        (b"\rbar\r   \r", []),
        (b"\rbar\r   \rnext\n", ["next"]),
        ("grün 漢字 █▌ 😀\n".encode(), ["grün 漢字 █▌ 😀"]),
        (b"cut \xe6\xbc\nbad \xff\xfe\n", ["cut �", "bad ��"]),
        (b"unfinished \xe6\xbc", ["unfinished �"]),
        (b"a\tb\n", ["a       b"]),
        (b"bell\x07 nul\x00 del\x7f\n", ["bell␇ nul␀ del␡"]),
        ("c1 \x9b31m nel\x85 sep\u2028 rtl\u202e\n".encode(), ["c1 �31m nel� sep� rtl�"]),
        (b"\x1b[1;31mred\x1b[0m plain\n", ["red plain"]),
        (b"\x1b]0;a title\x07after\n", ["after"]),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", ["link"]),
        (b"clear\x1b[2J\x1b[1;1H\x1bc screen\x1b(B\n", ["clear screen"]),
        (b"cut sequence \x1b[31\ncut title \x1b]0;ti\nbare \x1b\n", ["cut sequence ", "cut title ", "bare "]),  # noqa: E501
    ],
)  # fmt: skip
def test_lines_of_splits_bytes(data: bytes, lines: list[str]) -> None:
    assert lines_of(data) == lines


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"plain\n", "plain"),
        (b"\x1b[1;31mred\n", f"\x1b[1;31mred{RESET}"),
        (b"\x1b[38;2;1;2;3mtrue\x1b[m\n", f"\x1b[38;2;1;2;3mtrue\x1b[m{RESET}"),
        # The sequence ends in m but is no colour.
        (b"\x1b[>4;1mkeyboard mode\x1b[2K\n", "keyboard mode"),
    ],
)
def test_colours_are_kept_and_reset_if_enabled(data: bytes, line: str) -> None:
    assert lines_of(data, color=True) == [line]


def test_live_is_unfinished_line() -> None:
    splitter = LineSplitter()
    seen = []
    for data in (b"no", b"\r 10%|\xe2\x96", b"\x88 |", b"\r", b"\x1b[1m 20%\x1b[", b"\n", b"no"):
        assert splitter.feed(data) in ([], [" 20%"])
        seen.append(splitter.live)
    assert seen == ["no", " 10%|", " 10%|█ |", " 10%|█ |", " 20%", "", "no"]


def test_erased_bar_is_not_live() -> None:
    splitter = LineSplitter()
    splitter.feed(b"\r 99%|")
    splitter.feed(b"\r     \r")
    assert splitter.live == ""


NASTY = st.sampled_from([
    b"\r", b"\n", b"\r\n", b"\t", b"\x00", b"\x1b", b"\x1b[31m", b"\x1b[2K", b"\x1b]0;t\x07", b"[",
    b"abc", b"0123456789", "é".encode(), "漢".encode(), "😀".encode(), b"\xff", b"\xc2\x9b",
])  # fmt: skip
BYTES = st.lists(NASTY | st.binary(max_size=4), max_size=30).map(b"".join)


@settings(max_examples=100, deadline=None)
@given(data=BYTES, cuts=st.lists(st.integers(0, 200)), color=st.booleans())
def test_lines_are_independent_of_chunk_boundaries(
    data: bytes, cuts: list[int], color: bool
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    with mock.patch.object(screen_lines, "LONGEST_CHARACTERS", 7):
        splitter = LineSplitter(color)
        lines = []
        for begin, end in pairwise(edges):
            lines += splitter.feed(data[begin:end])
            # The kept part is bounded by a line and its \r.
            assert len(splitter._partial) <= 7 + 1
        assert lines + splitter.flush() == lines_of(data, color)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20) | BYTES.map(lambda data: data.decode("utf-8", "replace")))
def test_clean_removes_terminal_controls(text: str) -> None:
    assert not [c for c in clean_line(text) if unicodedata.category(c) in ("Cc", "Zl", "Zp")]
    coloured = re.sub(r"\x1b\[[0-9;:]*m", "", clean_line(text, color=True))
    assert "\x1b" not in coloured
    # The columns of tabs differ.
    assert coloured.split() == clean_line(text).split()


def test_endless_line_is_split_in_bounded_memory() -> None:
    block = b"x" * (1 << 20)
    splitter = LineSplitter()
    tracemalloc.start()
    try:
        pieces = [len(line) for _ in range(100) for line in splitter.feed(block)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    [last] = splitter.flush()
    assert peak < 8 << 20
    assert set(pieces) == {64 * 1024}
    assert sum(pieces) - len(pieces) * len(CONTINUED) + len(last) == 100 << 20


def test_long_line_is_cut_at_limit() -> None:
    with mock.patch.object(screen_lines, "LONGEST_CHARACTERS", 7):
        assert lines_of(b"0123456\n") == ["0123456"]
        assert lines_of(b"01234567\n") == ["0123456…", "7"]
        assert lines_of("äöüß漢字😀!".encode()) == ["äöüß漢字😀…", "!"]
        assert lines_of(b"01234567\r\n") == ["0123456…", "7"]
        splitter = LineSplitter()
        assert splitter.feed(b"01234567\r") + splitter.feed(b"next\n") == ["0123456…", "next"]


def test_progress_bar_is_no_long_line() -> None:
    moves = b"".join(b"\r%7d/1000000" % step for step in range(100_000))
    assert lines_of(moves + b"\n") == ["  99999/1000000"]
