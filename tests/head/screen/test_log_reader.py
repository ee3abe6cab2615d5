from __future__ import annotations

import os
import re
import tempfile
import tracemalloc
import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.head.screen import log_reader
from orchestrator.head.screen.log_reader import (
    CONTINUED,
    LineSplitter,
    LogFile,
    LogReader,
    clean,
    last_begin,
    tail,
)

RESET = "\x1b[0m"


def log_in(directory: Path, node: int = 0) -> LogFile:
    name = f"node_{node}_10.0.0.{node}"
    return LogFile(node, f"10.0.0.{node}", directory / f"{name}.txt", directory / f"{name}.ranks")


def append(log: LogFile, *pieces: tuple[str, bytes]) -> None:
    """As a follower does it."""
    at = log.size()
    with log.ranks.open("ab") as ranks, log.text.open("ab") as text:
        for stream, data in pieces:
            ranks.write(f"{at} {stream}\n".encode())
            text.write(data)
            at += len(data)


def lines_of(data: bytes, color: bool = False) -> list[str]:
    splitter = LineSplitter(color)
    return splitter.feed(data) + splitter.flush()


# --- lines ---------------------------------------------------------------------------------------


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
        (b"\rbar\r   \r", []),  # a bar that wiped itself away leaves nothing
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
def test_bytes_to_lines(data: bytes, lines: list[str]) -> None:
    assert lines_of(data) == lines


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"plain\n", "plain"),
        (b"\x1b[1;31mred\n", f"\x1b[1;31mred{RESET}"),
        (b"\x1b[38;2;1;2;3mtrue\x1b[m\n", f"\x1b[38;2;1;2;3mtrue\x1b[m{RESET}"),
        (b"\x1b[>4;1mkeyboard mode\x1b[2K\n", "keyboard mode"),  # ends in m, yet is no colour
    ],
)
def test_colours_are_kept_and_reset_where_colour_is_on(data: bytes, line: str) -> None:
    assert lines_of(data, color=True) == [line]


def test_live_is_the_line_that_has_no_end_yet() -> None:
    splitter = LineSplitter()
    seen = []
    for data in (b"no", b"\r 10%|\xe2\x96", b"\x88 |", b"\r", b"\x1b[1m 20%\x1b[", b"\n", b"no"):
        assert splitter.feed(data) in ([], [" 20%"])
        seen.append(splitter.live)
    assert seen == ["no", " 10%|", " 10%|█ |", " 10%|█ |", " 20%", "", "no"]


def test_a_bar_that_wiped_itself_away_is_no_longer_live() -> None:
    splitter = LineSplitter()
    splitter.feed(b"\r 99%|")
    splitter.feed(b"\r     \r")
    assert splitter.live == ""


NASTY = st.sampled_from([
    b"\r", b"\n", b"\r\n", b"\t", b"\x00", b"\x1b", b"\x1b[31m", b"\x1b[2K", b"\x1b]0;t\x07", b"[",
    b"abc", b"0123456789", "é".encode(), "漢".encode(), "😀".encode(), b"\xff", b"\xc2\x9b",
])  # fmt: skip
BYTES = st.lists(NASTY | st.binary(max_size=4), max_size=30).map(b"".join)


@settings(max_examples=500, deadline=None)
@given(data=BYTES, cuts=st.lists(st.integers(0, 200)), color=st.booleans())
def test_lines_do_not_depend_on_where_the_bytes_were_split(
    data: bytes, cuts: list[int], color: bool
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    with mock.patch.object(log_reader, "LONGEST", 7):
        splitter = LineSplitter(color)
        lines = []
        for begin, end in pairwise(edges):
            lines += splitter.feed(data[begin:end])
            assert len(splitter._partial) <= 7 + 1  # what is kept is bounded: a line and its \r
        assert lines + splitter.flush() == lines_of(data, color)


@settings(max_examples=500, deadline=None)
@given(text=st.text(max_size=20) | BYTES.map(lambda data: data.decode("utf-8", "replace")))
def test_nothing_that_is_shown_can_control_a_terminal(text: str) -> None:
    assert not [c for c in clean(text) if unicodedata.category(c) in ("Cc", "Zl", "Zp")]
    coloured = re.sub(r"\x1b\[[0-9;:]*m", "", clean(text, color=True))
    assert "\x1b" not in coloured
    assert coloured.split() == clean(text).split()  # but for the columns of tabs


def test_a_line_without_an_end_comes_in_pieces_and_does_not_grow_memory() -> None:
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


def test_where_a_long_line_is_cut() -> None:
    with mock.patch.object(log_reader, "LONGEST", 7):
        assert lines_of(b"0123456\n") == ["0123456"]
        assert lines_of(b"01234567\n") == ["0123456…", "7"]
        assert lines_of("äöüß漢字😀!".encode()) == ["äöüß漢字😀…", "!"]
        assert lines_of(b"01234567\r\n") == ["0123456…", "7"]
        splitter = LineSplitter()
        assert splitter.feed(b"01234567\r") + splitter.feed(b"next\n") == ["0123456…", "next"]


def test_a_bar_of_many_moves_is_not_a_long_line() -> None:
    moves = b"".join(b"\r%7d/1000000" % step for step in range(100_000))
    assert lines_of(moves + b"\n") == ["  99999/1000000"]


# --- reading -------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_yet_and_one_without_records(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    reader = LogReader(log)
    assert (reader.read(), reader.behind()) == ([], 0)
    log.text.write_bytes(b"words\n")
    assert reader.behind() == 6
    assert reader.read() == [("-", b"words\n")]
    assert (reader.read(), reader.behind(), reader.position) == ([], 0, 6)


def test_a_record_half_written_or_garbled_is_not_believed(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    reader = LogReader(log)
    log.ranks.write_bytes(b"0 1\nnonsense\n4 x\n4 12")
    log.text.write_bytes(b"one\n")
    assert reader.read() == [("1", b"one\n")]
    with log.ranks.open("ab") as ranks:
        ranks.write(b"3\n")
    log.text.write_bytes(b"one\ntwo\n")
    assert reader.read() == [("123", b"two\n")]


PIECES = st.lists(st.tuples(st.sampled_from(["-", "0", "1", "12"]), BYTES), max_size=20)


@settings(max_examples=100, deadline=None)
@given(pieces=PIECES, limits=st.lists(st.integers(1, 50), min_size=1), data=st.data())
def test_every_byte_is_read_once_and_by_the_right_stream(
    pieces: list[tuple[str, bytes]], limits: list[int], data: st.DataObject
) -> None:
    read = []
    written = 0
    # blocks of 16 bytes, so that records come in several of them
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(log_reader, "_BLOCK", 16):
        log = log_in(Path(directory))
        reader = LogReader(log)
        for limit in limits:
            count = data.draw(st.integers(0, len(pieces) - written))
            append(log, *pieces[written : written + count])
            written += count
            read += reader.read(limit)
        append(log, *pieces[written:])
        while reader.behind():
            read += reader.read(limits[0])
    assert joined(read, None) == joined(pieces, None)
    for stream in ("-", "0", "1", "12"):
        assert joined(read, stream) == joined(pieces, stream)


def joined(pieces: Iterable[tuple[str, bytes]], stream: str | None) -> bytes:
    return b"".join(data for name, data in pieces if stream in (None, name))


def test_bytes_that_arrive_while_reading_are_not_given_to_the_wrong_stream(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    append(log, ("1", b"a"))
    real_read = log_reader._read

    def read_and_grow(path: Path, offset: int, limit: int) -> bytes:
        data = real_read(path, offset, limit)
        append(log, ("2", b"b"))
        return data

    reader = LogReader(log)
    with mock.patch.object(log_reader, "_read", side_effect=read_and_grow):
        assert reader.read() == [("1", b"a")]
        assert {stream for stream, _ in reader.read()} == {"2"}


def test_skipping_knows_the_stream_and_reads_few_records(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    lines = [f"{i} {i % 8}\n" for i in range(0, 3_000_000, 10)]
    log.ranks.write_text("".join(lines))  # several MB of them
    log.text.write_bytes(b"123456789\n" * 300_000)
    with mock.patch.object(log_reader, "_read", side_effect=log_reader._read) as reads:
        for record in (0, 1, 77_777, 299_999):
            reader = LogReader(log, start=record * 10 + 4)
            assert reader.read(7) == [
                (str(record * 10 % 8), b"56789\n"),
                *([(str((record + 1) * 10 % 8), b"1")] if record < 299_999 else []),
            ]
    assert sum(call.args[2] for call in reads.mock_calls) < 2 << 20


def test_skipping_near_the_end_lands_on_a_line(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    append(log, ("0", b"first line\nsecond line\nthird line\n"))
    reader = LogReader(log)
    assert reader.skip_near_end(15) == 23
    assert reader.read() == [("0", b"third line\n")]
    assert reader.skip_near_end(15) == 0  # never back
    append(log, ("1", b"x" * 100))
    assert reader.skip_near_end(15) == 85  # no line start there: better a part than nothing
    assert reader.read() == [("1", b"x" * 15)]


# --- the last lines ------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(pieces=PIECES, lines=st.integers(0, 6), rank=st.sampled_from([None, 0, 12]))
def test_tail_is_the_end_of_all_lines(
    pieces: list[tuple[str, bytes]], lines: int, rank: int | None
) -> None:
    if rank is None:  # else unfinished lines of long ago, of any rank, would come last
        pieces = [(stream, data + b"\n") for stream, data in pieces]
    with tempfile.TemporaryDirectory() as directory:
        log = log_in(Path(directory))
        append(log, *pieces)
        everything = tail(log, 10_000, rank)
        with mock.patch.object(log_reader, "_BLOCK", 16):
            assert tail(log, lines, rank) == (everything[-lines:] if lines else [])
    if rank is not None:
        assert everything == lines_of(joined(pieces, str(rank)))


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.sampled_from("01-"), st.integers(1, 3), st.integers(0, 40))),
    lines=st.integers(0, 9),
    rank=st.sampled_from([None, 0, 1]),
)
def test_who_reads_on_from_the_last_lines_sees_these(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[str, int, int]],
    lines: int,
    rank: int | None,
) -> None:
    log = log_in(tmp_path_factory.mktemp("logs"))
    append(log)  # an empty one
    for number, (stream, count, length) in enumerate(pieces):
        append(log, (stream, b"".join(b"%d %s\n" % (number, b"x" * length) for _ in range(count))))
    with mock.patch.object(log_reader, "_BLOCK", 64):  # several windows
        reader = LogReader(log, start=last_begin(log, lines, rank))
    found = b"".join(data for stream, data in reader.read() if rank is None or stream == str(rank))
    every = tail(log, 10_000, rank)
    assert lines_of(found) == (every[-lines:] if lines else [])


def test_tail_of_a_huge_log_reads_only_its_end(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    with log.text.open("wb") as text:
        text.truncate(20 << 30)  # sparse
    append(log, ("3", b"\nTraceback\nRuntimeError: boom\n"), ("-", b"torchrun says\n" * 10_000))
    with mock.patch.object(log_reader, "_read", side_effect=log_reader._read) as reads:
        assert tail(log, 2, None) == ["torchrun says"] * 2
        assert sum(call.args[2] for call in reads.mock_calls) < 1 << 20
        assert tail(log, 2, 3) == ["Traceback", "RuntimeError: boom"]
        assert tail(log, 2, 7) == []
        assert sum(call.args[2] for call in reads.mock_calls) < 64 << 20


def test_tail_looks_back_until_the_lines_are_whole(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    lines = [f"{i:099}" for i in range(100)]
    append(log, ("0", "".join(f"{line}\n" for line in lines).encode()))
    with mock.patch.object(log_reader, "_BLOCK", 16):
        for count in range(1, 20):
            assert tail(log, count, None) == lines[-count:]


def test_tail_leaves_no_hole_where_a_stream_said_one_thing(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    append(log, ("0", b"a\n" * 20), ("1", b"only\n"))
    with mock.patch.object(log_reader, "_BLOCK", 16):
        assert tail(log, 2, None) == ["a", "only"]


def test_tail_that_looked_back_far_enough_gives_what_it_has(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    append(log, ("0", b"words\n" * 50_000), ("1", b"the only line\n"))
    with mock.patch.object(log_reader, "_TAIL_LOOKS_BACK", 100_000):
        assert tail(log, 5, 1) == ["the only line"]


def test_tail_of_one_endless_line_is_its_last_piece(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.text.write_bytes(b"x" * 300_000)
    with mock.patch.object(log_reader, "_TAIL_LOOKS_BACK", 100_000):
        [line] = tail(log, 1, None)
    assert set(line) == {"x"}


def test_tail_has_the_unfinished_words_of_a_rank_that_died(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    append(log, ("1", b"begun\nFatal "), ("0", b"busy\n" * 20_000), ("1", b"error"))
    assert tail(log, 1, None) == tail(log, 1, 1) == ["Fatal error"]


def test_tail_of_nothing(tmp_path: Path) -> None:
    assert tail(log_in(tmp_path), 5, None) == []
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_whose_a_byte_is_takes_a_few_small_reads(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.text.write_text("x" * 300_000)
    log.ranks.write_text(
        "".join(f"{at} {at // 3 % 11}\n" for at in range(5, 300_000, 13)) + "29999"
    )
    for offset in (0, 4, 5, 17, 18, 19, 150_000, 299_990, 299_999, 400_000):
        with mock.patch.object(log_reader, "_read", wraps=log_reader._read) as read:
            stream = log_reader.stream_at(log, offset)
        assert sum(call.args[2] for call in read.call_args_list) < 8192
        pieces = LogReader(log, start=min(offset, 299_999)).read(1)
        assert stream == pieces[0].stream
    log.ranks.unlink()
    assert log_reader.stream_at(log, 7) == log_reader.NO_RANK
