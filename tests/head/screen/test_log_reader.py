import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.head.screen import log_reader
from orchestrator.head.screen.log_reader import LogFile, LogReader
from tests.head.screen.test_lines import BYTES

PIECES = st.lists(st.tuples(st.sampled_from(["-", "0", "1", "12"]), BYTES), max_size=20)


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


def test_read_accepts_missing_file_and_missing_records(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    reader = LogReader(log)
    assert (reader.read(), reader.behind()) == ([], 0)
    log.text.write_bytes(b"words\n")
    assert reader.behind() == 6
    assert reader.read() == [("-", b"words\n")]
    assert (reader.read(), reader.behind(), reader.position) == ([], 0, 6)


def test_read_ignores_partial_or_garbled_record(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    reader = LogReader(log)
    log.ranks.write_bytes(b"0 1\nnonsense\n4 x\n4 12")
    log.text.write_bytes(b"one\n")
    assert reader.read() == [("1", b"one\n")]
    with log.ranks.open("ab") as ranks:
        ranks.write(b"3\n")
    log.text.write_bytes(b"one\ntwo\n")
    assert reader.read() == [("123", b"two\n")]


@settings(max_examples=20, deadline=None)
@given(pieces=PIECES, limits=st.lists(st.integers(1, 50), min_size=1), data=st.data())
def test_read_returns_every_byte_once_with_its_stream(
    pieces: list[tuple[str, bytes]], limits: list[int], data: st.DataObject
) -> None:
    read = []
    written = 0
    # blocks of 16 bytes, so that records come in several of them
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(log_reader, "_BLOCK_BYTES", 16),
    ):
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


def test_read_assigns_bytes_that_arrive_during_it(tmp_path: Path) -> None:
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


def test_start_offset_finds_stream_with_few_reads(tmp_path: Path) -> None:
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


def test_skip_near_end_lands_on_line_start(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    append(log, ("0", b"first line\nsecond line\nthird line\n"))
    reader = LogReader(log)
    assert reader.skip_near_end(15) == 23
    assert reader.read() == [("0", b"third line\n")]
    assert reader.skip_near_end(15) == 0  # never back
    append(log, ("1", b"x" * 100))
    # Without a line start there, a part of a line is shown.
    assert reader.skip_near_end(15) == 85
    assert reader.read() == [("1", b"x" * 15)]


@pytest.mark.parametrize(("name", "what"), [("text", "link"), ("ranks", "link"), ("ranks", "pipe")])
def test_read_refuses_pipe_or_link(tmp_path: Path, name: str, what: str) -> None:
    log = LogFile(0, "a", tmp_path / "text", tmp_path / "ranks")
    log.text.write_bytes(b"line\n")
    place = tmp_path / name
    place.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("secret\n")
    os.mkfifo(place) if what == "pipe" else place.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match=r"not a plain file|symbolic links"):
        log_reader.tail_lines(log, 1, None) or LogReader(log).read(9)
