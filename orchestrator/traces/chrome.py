"""Read a Chrome trace piece by piece: one of 200 MB costs no more memory than one of 2 MB.

As torch.profiler writes it: an object whose key `traceEvents` is a list of events. The keys before
that list are known before the first event is read.
"""

from __future__ import annotations

import codecs
import contextlib
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
LARGEST_CHARACTERS = 1 << 24  # of one event, or of all that is before the events
MOST_BYTES = 1 << 33  # of a whole trace: a small packed file may unfold to anything
MOST_RANKS = 1 << 20
LATEST_NANOSECONDS = 1e19  # of the Unix clock in the year 2286
MAGIC = b"\x1f\x8b"  # of gzip
BETWEEN = re.compile(r"[\s,]*")
LIST = re.compile(r'"traceEvents"\s*:\s*\[')


class Trace:
    """An open trace: what it says of itself, and its events, which can be read once."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text, self.at, self.count = "", 0, 0
        with understood(path):
            self.header = self._header()

    def events(self) -> Iterator[dict[str, Any]]:
        with understood(self.path):
            yield from self._events()

    def _events(self) -> Iterator[dict[str, Any]]:
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

    def _header(self) -> dict[str, Any]:
        while (found := LIST.search(self.text)) is None:
            if len(self.text) > LARGEST_CHARACTERS or not self._more():
                raise KeyError("no list of traceEvents")
        before = self.text[: found.start()].rstrip().rstrip(",")
        self.at = found.end()
        header: dict[str, Any] = json.loads(before + "}")
        return header

    def _more(self) -> bool:
        data = self.file.read(PIECE_BYTES)
        self.count += len(data)
        if self.count > MOST_BYTES:
            raise ValueError(f"it unfolds to more than {MOST_BYTES >> 30} GB")
        self.text, self.at = self.text[self.at :] + self.decode(data, not data), 0
        return bool(data)

    @property
    def base(self) -> float:
        """Return the moment from which its times count, in microseconds of the Unix clock."""
        with understood(self.path):
            return number(self.header.get("baseTimeNanoseconds", 0)) / 1e3

    @property
    def rank(self) -> int | None:
        """Return the rank that it says it is of."""
        rank = self.about.get("rank", dict_of(self.header.get("distributedInfo")).get("rank"))
        return rank if isinstance(rank, int) and 0 <= rank < MOST_RANKS else None

    @property
    def about(self) -> dict[str, Any]:
        """Return what our own ranks have noted there."""
        return dict_of(self.header.get("orchestrator"))


def number(value: Any) -> float:
    """Take a time as it stands in a trace; one that is no number of this world is an error."""
    taken = float(value)
    if not abs(taken) < LATEST_NANOSECONDS:  # NaN is not either
        raise ValueError(f"a time of {taken}")
    return taken


def dict_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@contextmanager
def opened(path: Path) -> Iterator[Trace]:
    """Open a trace, packed or not; what is none, here or further on, is a UsageError."""
    with contextlib.ExitStack() as stack:
        with understood(path):
            file = stack.enter_context(files.open_plain(path))
            packed = file.read(2) == MAGIC
            file.seek(0)
        plain = gzip.GzipFile(fileobj=file) if packed else file
        yield Trace(path, cast("IO[bytes]", plain))


@contextmanager
def understood(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        *(OSError, ValueError, OverflowError, KeyError, TypeError),
        *(EOFError, zlib.error, RecursionError),
    ) as bad:
        raise UsageError(f"{path} is not a Chrome trace: {bad}") from bad
