"""Append to local copies of files that grow on a node while the job runs: metrics and traces.

Requests go over the channel that streams the log, one at a time. The file's length is the only
state, as for logs. Each request overlaps the last bytes of the local file. If these bytes differ on
the node, it is another file, and the local one is left alone.

The metrics of a rank in a later attempt are a special case. Its node may have cut off the steps
that are repeated, or it may be another node without the earlier lines. Once the rank has written a
line of this attempt, the local file keeps its lines of earlier steps. The node's lines follow:
those of this attempt, and earlier ones that were never fetched.
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

# The overlap of a request is longer than a line of metrics, whose time makes it unique.
SEAM_BYTES = 512
# Larger metrics that an earlier attempt began are not joined while the job runs.
MOST_BYTES = 64 << 20
# Several nodes may have files of the same name.
APPENDING = threading.Lock()
READ_AND_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
GROWS = re.compile(r".*\.(jsonl|csv|tsv)|(.*/)?[^/]*tfevents[^/]*|profile/.*")


class GrowingFiles:
    """The growing files of one node, which are appended to local copies."""

    def __init__(self, job: str, node: NodeRecord, outputs: Path) -> None:
        self.listing = Outputs(job=job, node=node.index)
        # The ranks of this node that ran in an earlier attempt.
        self.continued = node.numbers if node.first_job else ()
        self.outputs = outputs
        self.folder = Folder(outputs, private=True)
        # By path, the bytes by which the local file is longer than the node's.
        self.ahead: dict[str, int] = {}
        # Paths whose local file is another one.
        self.foreign: set[str] = set()
        # Metrics that an earlier attempt began: the bytes read so far, the node's listing at that
        # time, and the offset at which this attempt begins in the local file.
        self.read: dict[str, bytes] = {}
        self.looked_at: dict[str, OutputFile] = {}
        self.joined_at: dict[str, int] = {}
        # Returns the start of the attempt by the node's clock.
        self.began: Callable[[], float] = lambda: 0.0
        self.next_look = 0.0
        self.asked = False
        self.questions: list[Request[Any]] = []

    def is_continued(self, path: str) -> bool:
        """Return True for the metrics of a rank of this node since an earlier attempt."""
        known = trainers.of_name(path)
        return known is not None and known[1] in self.continued

    def finish(self, channel: NodeChannel, listing: OutputFiles, seconds: float) -> None:
        """Fetch all growth up to this listing of the job's outputs; block until it is here."""
        self.begin()
        self.answered(self.listing, listing)
        while self.questions:
            question = self.questions.pop(0)
            try:
                self.answered(question, channel.ask(question, seconds))
            except Declined:
                self.refused(question)

    def begin(self) -> None:
        """Reset the requests after a reconnect, as the pending one was lost."""
        self.questions.clear()
        self.asked, self.next_look = False, time.monotonic() + LOOK_SECONDS

    @property
    def due(self) -> float:
        """Return the monotonic time of the next request."""
        return math.inf if self.asked else 0.0 if self.questions else self.next_look

    def question(self) -> Request[Any] | None:
        """Return the next request if it is due and no request is pending."""
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
        """Handle the answer to a request of this object; ignore all others."""
        if isinstance(answer, OutputFiles):
            self._look(answer)
        elif isinstance(request, ReadFile) and isinstance(answer, FilePiece):
            try:
                self._take(request, answer.data)
            except OSError:
                # The disk is full or the name is taken; the final fetch reports it.
                self.foreign.add(request.path)
        else:
            return
        self.asked = False

    def _look(self, listing: OutputFiles) -> None:
        """Queue requests for the bytes that local files lack."""
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
        except FileNotFoundError:
            # The file was never here, or was deleted.
            self.ahead.pop(path, None)
        except NotADirectoryError:
            self.foreign.add(path)
        return 0

    def _ask(self, request: ReadFile) -> None:
        """Queue a request for the bytes after the local ones, with an overlap."""
        path = request.path
        first = max(self.joined_at.get(path, 0), self._size(path) - SEAM_BYTES)
        self.questions.append(request.replace(offset=first - self.ahead.get(path, 0)))

    def _take(self, request: ReadFile, data: bytes) -> None:
        """Append new bytes if the overlap is the same as in the local file."""
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
        """Collect metrics that an earlier attempt began, and join them once all are read."""
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
    """Return the number of local bytes to keep and of the node's bytes to skip. Pure.

    Returns None if the node has no line of the attempt that began at `began`.
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
