"""Append to local copies of files that grow on a node while the job runs: metrics and traces.

Requests go over the channel that streams the log, one at a time. The file's length is the only
state, as for logs. Each request overlaps the last bytes of the local file. If these bytes differ on
the node, it is another file, and the local one is left alone.

The metrics of the node's own ranks are an exception. A rank that is started again cuts off the
steps that it repeats, so its file is fetched from the beginning.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.common.folder import Folder
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.transfer.fetch import is_plain_path
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
from orchestrator.protocol.timing import GROWTH_SECONDS
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics import trainers

log = logging.getLogger(__name__)

# The overlap of a request is longer than a line of metrics, whose time makes it unique.
SEAM_BYTES = 512
# Several nodes may have files of the same name.
APPENDING = threading.Lock()
READ_AND_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
GROWS = re.compile(r".*\.(jsonl|csv|tsv)|(.*/)?[^/]*tfevents[^/]*|profile/.*")


class GrowingFiles:
    """The growing files of one node, which are appended to local copies."""

    def __init__(self, job: str, node: NodeRecord, outputs: Path) -> None:
        # On node 0 all files are results, even those from the master of an earlier attempt.
        self.listing = Outputs(job=job, part=node.part, own=node.index > 0)
        self.node = node
        self.outputs = outputs
        self.folder = Folder(outputs, private=True)
        # Paths whose local file has grown to a beginning of the node's.
        self.grown: set[str] = set()
        # Paths whose local file is another one.
        self.foreign: set[str] = set()
        # The listing of each path that was last asked for.
        self.looked_at: dict[str, OutputFile] = {}
        self.next_look = 0.0
        self.asked = False
        self.questions: list[Request[Any]] = []

    def is_own(self, path: str) -> bool:
        """Return True for the metrics of a rank of this node."""
        known = trainers.FILE.fullmatch(path)
        return known is not None and int(known[1]) in self.node.numbers

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
        self.looked_at.clear()
        self.asked, self.next_look = False, time.monotonic() + GROWTH_SECONDS

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
            self.next_look = now + GROWTH_SECONDS
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
            ours = (
                file.kind == "file"
                and not file.place
                and is_plain_path(path)
                and GROWS.fullmatch(path)
            )
            if not ours or path in self.foreign:
                continue
            size = self._size(path)
            if size < file.size or (self.is_own(path) and file != self.looked_at.get(path)):
                self.looked_at[path] = file
                begin = max(0, min(size, file.size) - SEAM_BYTES)
                self.questions.append(ReadFile(place=listing.place, path=path, offset=begin))

    def _size(self, path: str) -> int:
        # The file was never here, or was deleted.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.lstat(self.outputs / path).st_size
        return 0

    def _take(self, request: ReadFile, data: bytes) -> None:
        """Append new bytes if the overlap is the same as in the local file."""
        path = request.path
        self.folder.make()
        parts = PurePosixPath(path).parts
        with self.folder.inside(parts[:-1]) as directory:
            descriptor = os.open(parts[-1], READ_AND_APPEND, 0o600, dir_fd=directory)
        with APPENDING, os.fdopen(descriptor, "rb+", buffering=0) as local:
            size = os.fstat(descriptor).st_size
            seam = size - request.offset
            if not 0 <= seam <= len(data) or data[:seam] != os.pread(descriptor, seam, size - seam):
                if not self.is_own(path):
                    log.debug("%s of job %s is another here", path, self.listing.job)
                    self.foreign.add(path)
                    self.grown.discard(path)
                    return
                os.ftruncate(descriptor, 0)
                self.questions.append(request.replace(offset=0))
                return
            self.grown.add(path)
            local.write(data[seam:])
        if len(data) == PIECE_BYTES:
            self.questions.append(request.replace(offset=request.offset + len(data) - SEAM_BYTES))
