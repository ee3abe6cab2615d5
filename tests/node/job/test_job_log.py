import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.head.screen.log_reader import LogFile, LogReader
from orchestrator.node.job.part import job_log
from orchestrator.node.job.part.job_log import PARTIAL_BYTES, PARTIAL_SECONDS, JobLog
from tests.node.running import streams

LOST = re.compile(rb"\norchestrator: (\d+) bytes of output were lost here: (.*)\n")


class Files:
    """A job log in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.log, self.ranks = directory / "log", directory / "ranks"
        self.job_log = JobLog(str(self.log), str(self.ranks))

    def close(self) -> None:
        os.close(self.job_log.log)
        os.close(self.job_log.ranks)

    def streams(self) -> dict[str, bytes]:
        return streams(self.log.read_bytes(), self.ranks.read_bytes())


@contextmanager
def new_files() -> Iterator[Files]:
    with tempfile.TemporaryDirectory() as directory:
        files = Files(Path(directory))
        yield files
        files.close()


@pytest.fixture
def files() -> Iterator[Files]:
    with new_files() as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The time that passes for the log is what a test says."""
    monotonic = mock.Mock(return_value=0.0)
    monkeypatch.setattr(job_log.time, "monotonic", monotonic)
    return monotonic


def whole(feeds: Sequence[tuple[str, bytes]]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for stream, data in feeds:
        found[stream] = found.get(stream, b"") + data
    return found


pieces = st.lists(
    st.tuples(
        st.sampled_from(["-", "0", "1", "17"]),
        st.one_of(
            st.binary(max_size=20),
            st.text("ab\n\r", max_size=20).map(str.encode),
            st.integers(PARTIAL_BYTES - 2, PARTIAL_BYTES + 2).map(lambda n: b"x" * n),
        ),
        st.booleans(),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(pieces)
def test_every_byte_arrives_in_order(fed: list[tuple[str, bytes, bool]]) -> None:
    with new_files() as files, mock.patch.object(job_log.time, "monotonic") as monotonic:
        monotonic.return_value = 0.0
        for stream, data, pause in fed:
            files.job_log.feed(stream, data)
            monotonic.return_value += 2 * PARTIAL_SECONDS * pause
            files.job_log.flush()
        files.job_log.flush(everything=True)
        expected = whole([(stream, data) for stream, data, _ in fed if data])
        assert files.streams() == expected
        # The head, which reads the same two files, sees the same.
        reader = LogReader(LogFile(0, "", files.log, files.ranks))
        assert whole([(piece.stream, piece.data) for piece in reader.read(1 << 30)]) == expected


@settings(deadline=None)
@given(pieces)
def test_lines_of_two_streams_never_mix(fed: list[tuple[str, bytes, bool]]) -> None:
    """Without a pause, what one stream wrote in one go ends where a line ends."""
    with new_files() as files:
        for stream, data, _ in fed:
            files.job_log.feed(stream, data[: PARTIAL_BYTES // 64])
        log, ranks = files.log.read_bytes(), files.ranks.read_bytes()
        starts = [int(line.split()[0]) for line in ranks.splitlines()][1:]
        assert all(log[start - 1 : start] in (b"\n", b"\r") for start in [*starts, len(log)] if log)


def test_slow_line_is_written_in_parts(files: Files, clock: mock.Mock) -> None:
    files.job_log.feed("0", b"name? ")
    assert files.job_log.flush() == pytest.approx(PARTIAL_SECONDS)
    assert files.log.read_bytes() == b""
    clock.return_value += PARTIAL_SECONDS / 2
    files.job_log.feed("1", b"password? ")
    assert files.job_log.flush() == pytest.approx(PARTIAL_SECONDS / 2)
    clock.return_value += PARTIAL_SECONDS / 2
    assert files.job_log.flush() == pytest.approx(PARTIAL_SECONDS / 2)
    assert files.log.read_bytes() == b"name? "
    assert abs(time.time() - float(files.ranks.read_bytes().split()[-1])) < 60
    clock.return_value += PARTIAL_SECONDS / 2
    assert files.job_log.flush() is None
    assert files.streams() == {"0": b"name? ", "1": b"password? "}


def test_secrets_are_masked_and_other_bytes_kept(tmp_path: Path) -> None:
    secrets = ("tök-1", "tök-12345", "abc")
    log = JobLog(str(tmp_path / "log"), str(tmp_path / "ranks"), secrets=secrets)
    log.feed("0", "the key tök-12345, tök-1 and abc\nagain t".encode())
    log.feed("0", "ök-12345".encode())
    log.flush(everything=True)
    text = (tmp_path / "log").read_text()
    assert text == f"the key {'*' * 10}, {'*' * 6} and abc\nagain {'*' * 10}"
    os.close(log.log)
    os.close(log.ranks)


SECRET = b"t0ken-of-a-hub"


@pytest.mark.parametrize("cut", range(1, len(SECRET)))
def test_secret_in_two_writes_is_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """However long the second is in coming, no more than its first three bytes are shown."""
    monkeypatch.setattr("orchestrator.node.job.part.job_log.PARTIAL_SECONDS", 0.0)
    log = JobLog(str(tmp_path / "log"), str(tmp_path / "ranks"), secrets=[SECRET.decode()])
    log.feed("0", b"is " + SECRET[:cut])
    log.flush()
    log.feed("1", b"of another\n")
    log.feed("0", SECRET[cut:])
    log.flush()
    log.feed("0", b" and\nmore t0ke")
    log.flush(everything=True)
    said = (tmp_path / "log").read_bytes()
    shown = SECRET[:cut] if cut < 4 else b""
    assert said.replace(b"of another\n", b"") == b"is %b%b and\nmore t0ke" % (
        shown, b"*" * (len(SECRET) - len(shown)),
    )  # fmt: skip
    os.close(log.log)
    os.close(log.ranks)


def test_log_is_continued(files: Files) -> None:
    files.job_log.feed("0", b"before\n")
    again = JobLog(str(files.log), str(files.ranks))
    again.feed("1", b"after\n")
    assert files.streams() == {"0": b"before\n", "1": b"after\n"}


# -- a disk without room ----------------------------------------------------------------------


class SmallDisk:
    """os.write on a disk with so much room; of the last write a part fits, as on a real one."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write = os.write

    def __call__(self, fd: int, data: bytes | memoryview) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.write(fd, data[: self.room])
        self.room -= written
        return written


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["0", "1"]), st.integers(0, 60)), min_size=1, max_size=12),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_records_are_right_after_full_disk(
    feeds: list[tuple[str, int]], room: int, more: int
) -> None:
    """Wherever the room ends: in the middle of a line, of a record, of the words about the loss."""
    with new_files() as files:
        disk = SmallDisk(room)
        with mock.patch.object(job_log.os, "write", disk):
            for number, (stream, size) in enumerate(feeds):
                if number == len(feeds) // 2:
                    disk.room += more
                files.job_log.feed(stream, bytes([0x80 + number]) * size + b"\n")
            disk.room = 1 << 20
            files.job_log.feed("9", b"the end\n")
        assert files.job_log.lost == 0
        found = files.streams()
        assert found["9"].endswith(b"the end\n")
        there = 0
        for stream, part in found.items():
            fed = [byte for byte in part if byte >= 0x80]  # the rest is words about the loss
            assert fed == sorted(fed)
            assert {feeds[byte - 0x80][0] for byte in fed} <= {stream}
            there += len(fed)
        written = sum(size for _, size in feeds)
        assert there == written or any(LOST.search(part) for part in found.values())
