"""Appends what grows on a node to the same file here, while the job runs: metrics, and traces.

The questions go over the channel that streams the log, one at a time. The file's length is all the
state there is, as for logs: a new head continues a file whose bytes so far are the node's. What
comes home whole at the end of the job is left to home.py, which also compares the checksums.

The metrics of a rank in a later attempt are a special case. Its node may have cut off the steps
that are done again, or be another node that never had the earlier ones. So the file here keeps its
lines up to the first step that the node's file has and this one has not, and the node's follow.
A node that comes back may have lines of an earlier attempt, which others have measured again since:
these are passed over.
A rank cuts its file when it goes on, which may be long after the first look at it: so each question
also asks for the last bytes that were taken, and where others stand there all is compared again.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from orchestrator.common import files
from orchestrator.common.folder import Folder
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.transfer.fetch.fetch import plain
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import (
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
READ_AND_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
GROWS = re.compile(r".*\.(jsonl|csv|tsv)|(.*/)?[^/]*tfevents[^/]*|profile/.*")


@dataclass
class GrowingFile:
    """One file of the node, and how far the file here follows it."""

    # How many bytes more the file here has than the node's; None: this node does not fill it.
    ahead: int | None = None
    # Of a continued file: the bytes at its beginning there that were compared with those here.
    compared: int = 0
    # Of these the bytes that others have measured again since, so that they are not here.
    passed: int = 0
    # The last bytes that were taken of a continued file.
    seam: bytes = b""
    # Something else has its name here.
    is_foreign: bool = False


class GrowingFiles:
    """The files of one node that grow here as they do there."""

    def __init__(self, job: str, node: NodeRecord, outputs: Path) -> None:
        self.listing = Outputs(job=job, node=node.index)
        # Ranks that an earlier attempt had.
        self.continued = node.numbers if node.first_job else ()
        self.outputs = outputs
        self.folder = Folder(outputs, private=True)
        self.files: dict[str, GrowingFile] = defaultdict(GrowingFile)
        # When the attempt began, by the node's clock.
        self.began: Callable[[], float] = lambda: 0.0
        self.next_look = 0.0
        self.asked = False
        self.questions: list[Request[Any]] = []

    def is_continued(self, path: str) -> bool:
        """Return True for the metrics of a rank of this node since an earlier attempt."""
        known = trainers.of_name(path)
        return known is not None and known[1] in self.continued

    @property
    def ours(self) -> set[str]:
        """Return the paths of the files here that this node fills."""
        return {path for path, file in self.files.items() if file.ahead is not None}

    @property
    def joined(self) -> set[str]:
        """Return the continued files that are here as they should be, unlike those of the node."""
        sound = {path for path, file in self.files.items() if not file.is_foreign}
        return set(filter(self.is_continued, sound))

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
        self.asked = bool(self.questions)
        return self.questions.pop(0) if self.questions else None

    def refused(self, request: Request[Any] | None) -> None:
        if isinstance(request, (Outputs, ReadFile)):
            self.asked = False

    def answered(self, request: Request[Any], answer: Message) -> None:
        """Take an answer to one of these questions; another one is passed over."""
        try:
            if isinstance(answer, OutputFiles):
                self._look(answer)
            elif not isinstance(request, ReadFile) or not isinstance(answer, FilePiece):
                return
            elif request.with_sum:
                self._compare(request, answer)
            else:
                self._take(request, answer.data)
        except OSError:
            # No room, or something else has the name: the end of the job tells.
            if isinstance(request, ReadFile):
                self.files[request.path].is_foreign = True
        self.asked = False

    def _look(self, listing: OutputFiles) -> None:
        for file in listing.files:
            ours = file.kind == "file" and not file.place and plain(file.path)
            if ours and GROWS.fullmatch(file.path) and not self.files[file.path].is_foreign:
                self._begin(listing.place, file)

    def _begin(self, place: str, listed: OutputFile) -> None:
        """Ask for what the file here lacks, or whether it is the beginning of the node's."""
        path, continued = listed.path, self.is_continued(listed.path)
        try:
            here = os.lstat(self.outputs / path).st_size
        except FileNotFoundError:
            here = 0
            # It was never here, or was deleted.
            self.files[path] = GrowingFile()
        except NotADirectoryError:
            return
        file = self.files[path]
        if not here and continued:
            file.ahead = 0
        if file.ahead is not None or not here:
            at = here - (file.ahead or 0)
            if at != listed.size if continued else at < listed.size:
                self._ask(ReadFile(place=place, path=path, offset=at))
        elif continued:
            if file.compared != listed.size:
                self._ask(ReadFile(place=place, path=path, offset=file.compared))
        elif here < listed.size:
            self.questions.append(
                ReadFile(place=place, path=path, offset=here, size=0, with_sum=True)
            )

    def _compare(self, request: ReadFile, answer: FilePiece) -> None:
        """Go on behind the bytes that are here, if the node's file begins with them."""
        with files.open_plain(self.outputs / request.path) as file:
            known = files.digest(file.fileno(), 0, request.offset)
        if answer.sum == known:
            self.files[request.path].ahead = 0
            self.questions.append(
                ReadFile(place=request.place, path=request.path, offset=request.offset)
            )
        else:
            log.debug("%s of job %s is another here", request.path, self.listing.job)
            self.files[request.path].is_foreign = True

    def _ask(self, request: ReadFile) -> None:
        """Ask for what stands behind a place, and for the bytes before it that were taken."""
        seam = self.files[request.path].seam
        self.questions.append(request.replace(offset=request.offset - len(seam)))

    def _take(self, request: ReadFile, data: bytes) -> None:
        """Take a piece of a file, if it follows what was taken of it before."""
        path, file = request.path, self.files[request.path]
        if not data.startswith(file.seam):
            log.debug("%s of job %s was cut: compared again", path, self.listing.job)
            self.files[path] = GrowingFile()
            self._ask(request.replace(offset=0))
            return
        data, offset = data[len(file.seam) :], request.offset + len(file.seam)
        joins = file.ahead is None and self.is_continued(path)
        take = self._join if joins else self._append
        taken = take(path, file, offset, data)
        if self.is_continued(path):
            file.seam = (file.seam + data[:taken])[-SEAM_BYTES:]
        if taken or (joins and file.ahead is not None):
            self._ask(request.replace(offset=offset + taken))

    def _join(self, path: str, file: GrowingFile, offset: int, data: bytes) -> int:
        """Find the first line that the node has and the file here has not, and go on from there.

        Every question begins at the start of a line. Return how many bytes were passed over.
        """
        with os.fdopen(os.open(self.outputs / path, READ_AND_WRITE), "rb+") as local:
            here = offset - file.passed
            local.seek(here)
            begin = length_of_equal_lines(data, local.read(len(data)))
            here += begin
            again = self._length_of_done_again(data[begin:], local, here)
            file.passed += again
            begin += again
            line, end, _ = data[begin:].partition(b"\n")
            if end:
                cut = end_of_steps_before(step_of(line), local, here)
                local.truncate(cut)
                file.ahead = cut - offset - begin
            file.compared = offset + begin
        return begin

    def _length_of_done_again(self, data: bytes, file: BinaryIO, here: int) -> int:
        """Return how long the lines are of earlier attempts whose steps others have taken since."""
        old = list(itertools.takewhile(self._is_old, data.splitlines(keepends=True)))
        file.seek(here)
        last = max(map(step_of, file), default=-math.inf) if old else -math.inf
        return sum(map(len, itertools.takewhile(lambda line: step_of(line) <= last, old)))

    def _is_old(self, line: bytes) -> bool:
        return line.endswith(b"\n") and number_in(line, "time") < self.began()

    def _append(self, path: str, file: GrowingFile, offset: int, data: bytes) -> int:
        """Append what follows to the file here; return how many bytes were written."""
        if not data:
            return 0
        self.folder.make()
        parts = PurePosixPath(path).parts
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        if file.ahead is None:
            # Another node may have begun to fill it.
            flags |= os.O_EXCL
        with self.folder.inside(parts[:-1]) as directory:
            descriptor = os.open(parts[-1], flags | os.O_CLOEXEC, 0o600, dir_fd=directory)
            with os.fdopen(descriptor, "ab", buffering=0) as local:
                file.ahead = file.ahead or 0
                if local.tell() != offset + file.ahead:
                    # Another program writes here: the next look compares.
                    return 0
                return local.write(data)


def length_of_equal_lines(data: bytes, known: bytes) -> int:
    length = 0
    for line, other in zip(data.splitlines(True), known.splitlines(True), strict=False):
        if line != other or not line.endswith(b"\n"):
            break
        length += len(line)
    return length


def step_of(line: bytes) -> float:
    """Return the step that a line of metrics is of; -inf where it is none."""
    return number_in(line, "step")


def number_in(line: bytes, name: str) -> float:
    try:
        return float(json.loads(line)[name])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return -math.inf


def end_of_steps_before(step: float, file: BinaryIO, offset: int) -> int:
    """Return where the first line of this step or a later one begins, or half of a line."""
    file.seek(offset)
    for line in file:
        if not line.endswith(b"\n") or step_of(line) >= step:
            break
        offset += len(line)
    return offset
