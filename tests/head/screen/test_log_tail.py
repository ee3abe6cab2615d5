import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.head.screen import log_reader
from orchestrator.head.screen.log_reader import LogReader, last_begin, tail_lines
from tests.head.screen.test_lines import lines_of
from tests.head.screen.test_log_reader import PIECES, append, joined, log_in


@settings(max_examples=40, deadline=None)
@given(pieces=PIECES, lines=st.integers(0, 6), rank=st.sampled_from([None, 0, 12]))
def test_tail_is_end_of_all_lines(
    pieces: list[tuple[str, bytes]], lines: int, rank: int | None
) -> None:
    if rank is None:  # else unfinished lines of long ago, of any rank, would come last
        pieces = [(stream, data + b"\n") for stream, data in pieces]
    with tempfile.TemporaryDirectory() as directory:
        log = log_in(Path(directory))
        append(log, *pieces)
        everything = tail_lines(log, 10_000, rank)
        with mock.patch.object(log_reader, "_WINDOW_BYTES", 16):
            assert tail_lines(log, lines, rank) == (everything[-lines:] if lines else [])
    if rank is not None:
        assert everything == lines_of(joined(pieces, str(rank)))


@settings(max_examples=20, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.sampled_from("01-"), st.integers(1, 3), st.integers(0, 40))),
    lines=st.integers(0, 9),
    rank=st.sampled_from([None, 0, 1]),
)
def test_last_begin_positions_reader_at_last_lines(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[str, int, int]],
    lines: int,
    rank: int | None,
) -> None:
    log = log_in(tmp_path_factory.mktemp("logs"))
    append(log)  # an empty one
    for number, (stream, count, length) in enumerate(pieces):
        append(log, (stream, b"".join(b"%d %s\n" % (number, b"x" * length) for _ in range(count))))
    with mock.patch.object(log_reader, "_WINDOW_BYTES", 64):  # several windows
        reader = LogReader(log, start=last_begin(log, lines, rank))
    found = b"".join(data for stream, data in reader.read() if rank is None or stream == str(rank))
    every = tail_lines(log, 10_000, rank)
    assert lines_of(found) == (every[-lines:] if lines else [])


def test_tail_of_huge_log_reads_only_end(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    with log.text.open("wb") as text:
        text.truncate(20 << 30)  # sparse
    append(log, ("3", b"\nTraceback\nRuntimeError: boom\n"), ("-", b"torchrun says\n" * 10_000))
    with mock.patch.object(log_reader, "_read", side_effect=log_reader._read) as reads:
        assert tail_lines(log, 2, None) == ["torchrun says"] * 2
        assert sum(call.args[2] for call in reads.mock_calls) < 1 << 20
        assert tail_lines(log, 2, 3) == ["Traceback", "RuntimeError: boom"]
        assert tail_lines(log, 2, 7) == []
        assert sum(call.args[2] for call in reads.mock_calls) < 64 << 20


def test_tail_widens_window_until_lines_are_whole(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    lines = [f"{i:099}" for i in range(100)]
    append(log, ("0", "".join(f"{line}\n" for line in lines).encode()))
    with mock.patch.object(log_reader, "_WINDOW_BYTES", 16):
        for count in range(1, 20):
            assert tail_lines(log, count, None) == lines[-count:]


@pytest.mark.parametrize(
    ("pieces", "limit", "count", "rank", "lines"),
    [
        # No hole is left where a stream said one thing.
        ([("0", b"a\n" * 20), ("1", b"only\n")], ("_WINDOW_BYTES", 16), 2, None, ["a", "only"]),
        # It looks back far enough, and gives what it has.
        (
            [("0", b"words\n" * 50_000), ("1", b"the only line\n")],
            *(("_LOOKS_BACK_BYTES", 100_000), 5, 1, ["the only line"]),
        ),
        # The unfinished words of a rank that died are a line.
        (
            [("1", b"begun\nFatal "), ("0", b"busy\n" * 20_000), ("1", b"error")],
            *(("_LOOKS_BACK_BYTES", 16 << 20), 1, 1, ["Fatal error"]),
        ),
    ],
    ids=["no hole", "far enough", "unfinished"],
)
def test_tail_of_several_streams(
    tmp_path: Path,
    pieces: list[tuple[str, bytes]],
    limit: tuple[str, int],
    count: int,
    rank: int | None,
    lines: list[str],
) -> None:
    log = log_in(tmp_path)
    append(log, *pieces)
    with mock.patch.object(log_reader, *limit):
        assert tail_lines(log, count, rank) == lines


def test_tail_of_endless_line_is_last_piece(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.text.write_bytes(b"x" * 300_000)
    with mock.patch.object(log_reader, "_LOOKS_BACK_BYTES", 100_000):
        [line] = tail_lines(log, 1, None)
    assert set(line) == {"x"}


def test_tail_skips_shutdown_messages_of_torchrun(tmp_path: Path) -> None:
    """The screen leaves them out: of a node whose log ends with them nothing would be shown."""
    log = log_in(tmp_path)
    append(log, ("0", b"step 1\nstep 2\n"), ("~", b"the store is gone\n" * 10))
    assert tail_lines(log, 1, None) == ["step 2"]
    assert LogReader(log, start=last_begin(log, 1, None)).read()[0] == ("0", b"step 2\n")


def test_tail_of_missing_log_is_empty(tmp_path: Path) -> None:
    assert tail_lines(log_in(tmp_path), 5, None) == []
    assert os.listdir(tmp_path) == []  # noqa: PTH208
