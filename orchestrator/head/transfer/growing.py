"""Appends what grows on a node to the same file here, while the job runs: metrics, and traces.

The questions go over the channel that streams the log, one at a time. The file's length is all the
state there is, as for logs. Each question begins with the last bytes that are here: a file that has
others there is another file, and left alone.

The metrics of a rank in a later attempt are a special case: its node may have cut off the steps
that are done again, or be another node that never had the earlier ones. Once the rank has written a
line of this attempt, the file here keeps its lines of the steps before that one. What follows are
the node's lines: those of this attempt, and earlier ones that never came here.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.common.folder import Folder
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.transfer.fetch import plain
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import (
    PIECE_BYTES,
    FilePiece,
    OutputFile,
    OutputFiles,
    Outputs,
    ReadFile,
)
from orchestrator.protocol.timing import LOOK_SECONDS
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics import trainers

log = logging.getLogger(__name__)

SEAM_BYTES = 512  # more than a line of metrics, which has its time
MOST_BYTES = 64 << 20  # of metrics that an earlier attempt began
APPENDING = threading.Lock()  # several nodes may have files of one name
READ_AND_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
GROWS = re.compile(r".*\.(jsonl|csv|tsv)|(.*/)?[^/]*tfevents[^/]*|profile/.*")


class GrowingFiles:
    """The files of one node that grow here as they do there."""

    def __init__(self, job: str, node: NodeRecord, outputs: Path) -> None:
        self.listing = Outputs(job=job, node=node.index)
        # Ranks that an earlier attempt had.
        self.continued = node.numbers if node.first_job else ()
        self.outputs = outputs
        self.folder = Folder(outputs, private=True)
        # How many bytes more a file here has than the node's, of those that the node fills.
        self.ahead: dict[str, int] = {}
        # Something else has these names here.
        self.foreign: set[str] = set()
        # Metrics that an earlier attempt began, as far as they have been read; how they were listed
        # then; and where the part of this attempt begins here.
        self.read: dict[str, bytes] = {}
        self.looked_at: dict[str, OutputFile] = {}
        self.joined_at: dict[str, int] = {}
        # When the attempt began, by the node's clock.
        self.began: Callable[[], float] = lambda: 0.0
        self.next_look = 0.0
        self.asked = False
        self.questions: list[Request[Any]] = []

    def is_continued(self, path: str) -> bool:
        """Return True for the metrics of a rank of this node since an earlier attempt."""
        known = trainers.of_name(path)
        return known is not None and known[1] in self.continued

    def finish(self, channel: NodeChannel, listing: OutputFiles, seconds: float) -> None:
        """Ask for all that has grown until this listing of the job's outputs."""
        self.begin()
        self.answered(self.listing, listing)
        while self.questions:
            question = self.questions.pop(0)
            try:
                self.answered(question, channel.ask(question, seconds))
            except Declined:
                self.refused(question)

    def begin(self) -> None:
        """Begin again, after a connection that broke with a question on its way."""
        self.questions.clear()
        self.asked, self.next_look = False, time.monotonic() + LOOK_SECONDS

    @property
    def due(self) -> float:
        """Return when there is something to ask."""
        return math.inf if self.asked else 0.0 if self.questions else self.next_look

    def question(self) -> Request[Any] | None:
        """Return what is to be asked next, if it is time and nothing is on its way."""
        now = time.monotonic()
        if now < self.due:
            return None
        if not self.questions:
            self.next_look = now + LOOK_SECONDS
            self.questions.append(self.listing)
        self.asked = True
        return self.questions.pop(0)

    def refused(self, request: Request[Any] | None) -> None:
        if isinstance(request, (Outputs, ReadFile)):
            self.asked = False

    def answered(self, request: Request[Any], answer: Message) -> None:
        """Take an answer to one of these questions; another one is passed over."""
        if isinstance(answer, OutputFiles):
            self._look(answer)
        elif isinstance(request, ReadFile) and isinstance(answer, FilePiece):
            try:
                self._take(request, answer.data)
            except OSError:
                # No room, or something else has the name: the end of the job tells.
                self.foreign.add(request.path)
        else:
            return
        self.asked = False

    def _look(self, listing: OutputFiles) -> None:
        """Ask for what the files here lack of the node's."""
        for file in listing.files:
            path = file.path
            ours = file.kind == "file" and not file.place and plain(path) and GROWS.fullmatch(path)
            if not ours or path in self.foreign:
                continue
            request = ReadFile(place=listing.place, path=path, offset=0)
            if self.is_continued(path) and path not in self.ahead:
                if file != self.looked_at.get(path) and file.size <= MOST_BYTES:
                    self.looked_at[path], self.read[path] = file, b""
                    self.questions.append(request)
            elif self._size(path) - self.ahead.get(path, 0) < file.size:
                self._ask(request)

    def _size(self, path: str) -> int:
        try:
            return os.lstat(self.outputs / path).st_size
        except FileNotFoundError:  # it was never here, or was deleted
            self.ahead.pop(path, None)
        except NotADirectoryError:
            self.foreign.add(path)
        return 0

    def _ask(self, request: ReadFile) -> None:
        """Ask for what follows the bytes that are here, and for the last ones of these."""
        path = request.path
        first = max(self.joined_at.get(path, 0), self._size(path) - SEAM_BYTES)
        self.questions.append(request.replace(offset=first - self.ahead.get(path, 0)))

    def _take(self, request: ReadFile, data: bytes) -> None:
        """Append what follows the bytes here, if the node has these as well."""
        path = request.path
        if self.is_continued(path) and path not in self.ahead:
            self._read(request, data)
            return
        self.folder.make()
        parts, ahead = PurePosixPath(path).parts, self.ahead.get(path, 0)
        with self.folder.inside(parts[:-1]) as directory:
            descriptor = os.open(parts[-1], READ_AND_APPEND, 0o600, dir_fd=directory)
        with APPENDING, os.fdopen(descriptor, "rb+", buffering=0) as local:
            size = os.fstat(descriptor).st_size
            seam = size - ahead - request.offset
            if not 0 <= seam <= len(data) or data[:seam] != os.pread(descriptor, seam, size - seam):
                log.debug("%s of job %s is another here", path, self.listing.job)
                self.foreign.add(path)
                self.ahead.pop(path, None)
                return
            self.ahead[path] = ahead
            local.write(data[seam:])
        if len(data) == PIECE_BYTES:
            self._ask(request)

    def _read(self, request: ReadFile, data: bytes) -> None:
        """Read metrics that an earlier attempt began, and join them once all are read."""
        path = request.path
        self.read[path] += data
        if len(data) == PIECE_BYTES:
            self.questions.append(request.replace(offset=len(self.read[path])))
            return
        try:
            ours = (self.outputs / path).read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            ours = []
        joined = join(ours, self.read[path].splitlines(keepends=True), self.began())
        if joined is not None:
            kept, passed = joined
            if ours:
                os.truncate(self.outputs / path, kept)
            self.ahead[path], self.joined_at[path] = kept - passed, kept
            self._ask(request)


def join(ours: list[bytes], theirs: list[bytes], began: float) -> tuple[int, int] | None:
    """Return how many bytes stay here, and how many of the node's are passed over. Pure.

    None where the node has no line of an attempt that began at that time.
    """
    whole = [line for line in theirs if line.endswith(b"\n")]
    new = [at for at, line in enumerate(whole) if number_in(line, "time") >= began]
    if not new:
        return None
    first, step = new[0], number_in(whole[new[0]], "step")
    kept = list(
        itertools.takewhile(
            lambda line: line.endswith(b"\n") and number_in(line, "step") < step, ours
        )
    )
    last = max((number_in(line, "step") for line in kept), default=-math.inf)
    while first and number_in(whole[first - 1], "step") > last:
        first -= 1
    return sum(map(len, kept)), sum(map(len, whole[:first]))


def number_in(line: bytes, name: str) -> float:
    try:
        return float(json.loads(line)[name])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return -math.inf
