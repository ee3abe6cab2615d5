"""Reads a Chrome trace piece by piece: one of 200 MB costs no more memory than one of 2 MB.

torch.profiler writes an object whose key `traceEvents` is a list of events. The keys before that
list are known before the first event is read.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from orchestrator.common import files
from orchestrator.common.errors import UsageError

PIECE_BYTES = 1 << 20
# The limit of one event, and of all that stands before the events.
LARGEST_CHARACTERS = 1 << 24
# The limit of a whole trace: a small packed file may unfold to anything.
MOST_BYTES = 1 << 33
MOST_RANKS = 1 << 20
LATEST_NANOSECONDS = 1e19  # of the Unix clock in the year 2286
GZIP_MAGIC = b"\x1f\x8b"
# What json, gzip and the reading of an event raise for a damaged file.
DAMAGED = (
    gzip.BadGzipFile,
    ValueError,
    OverflowError,
    KeyError,
    TypeError,
    EOFError,
    zlib.error,
    RecursionError,
)
BETWEEN = re.compile(r"[\s,]*")
LIST = re.compile(r'"traceEvents"\s*:\s*\[')


class Trace:
    """An open trace: what it says of itself, and its events, which can be read once."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text, self.at, self.count = "", 0, 0
        while (found := LIST.search(self.text)) is None:
            if len(self.text) > LARGEST_CHARACTERS or not self._more():
                raise KeyError("no list of traceEvents")
        before = self.text[: found.start()].rstrip().rstrip(",")
        self.at = found.end()
        header: dict[str, Any] = json.loads(before + "}")
        # What a rank of the Trainer noted: its rank, its node, the steps.
        self.about = dict_of(header.get("orchestrator"))
        rank = self.about.get("rank", dict_of(header.get("distributedInfo")).get("rank"))
        self.rank = rank if isinstance(rank, int) and 0 <= rank < MOST_RANKS else None
        # The moment from which its times count, in microseconds of the Unix clock.
        self.base = number(header.get("baseTimeNanoseconds", 0)) / 1e3

    def events(self) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        while True:
            self.at = cast("re.Match[str]", BETWEEN.match(self.text, self.at)).end()
            if self.text.startswith("]", self.at):
                return
            try:
                event, self.at = decode(self.text, self.at)
            except ValueError:  # it goes on in the next piece
                if len(self.text) - self.at > LARGEST_CHARACTERS or not self._more():
                    raise
                continue
            if not isinstance(event, dict):
                raise TypeError("an event is not an object")
            yield event

    def _more(self) -> bool:
        data = self.file.read(PIECE_BYTES)
        self.count += len(data)
        if self.count > MOST_BYTES:
            raise ValueError(f"it unfolds to more than {MOST_BYTES >> 30} GB")
        self.text, self.at = self.text[self.at :] + self.decode(data, not data), 0
        return bool(data)


def number(value: Any) -> float:
    """Return a time of a trace; raise ValueError for NaN, infinity and impossible years."""
    taken = float(value)
    if not abs(taken) < LATEST_NANOSECONDS:  # NaN is not either
        raise ValueError(f"a time of {taken}")
    return taken


def dict_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@contextmanager
def opened(path: Path) -> Iterator[Trace]:
    """Open a trace, packed or not; what is none, here or further on, is a UsageError."""
    try:
        file = files.open_plain(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        try:
            packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            plain = gzip.GzipFile(fileobj=file) if packed else file
            yield Trace(cast("IO[bytes]", plain))
        except DAMAGED as bad:
            raise UsageError(f"{path} is not a Chrome trace: {bad}") from bad
