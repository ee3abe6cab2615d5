"""Appends what grows on a node to the same file here, while the job runs: metrics, and traces.

The questions go over the channel that streams the log, one at a time. The file's length is all the
state there is, as for logs: a new head continues a file whose bytes so far are the node's. What
comes home whole at the end of the job is left to remaining.py, which also compares the checksums.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.common import files
from orchestrator.common.folder import Folder
from orchestrator.head.outputs.fetch import plain
from orchestrator.protocol.message import Message
from orchestrator.protocol.messages import (
    Output,
    OutputFile,
    OutputFiles,
    OutputPiece,
    Outputs,
    OutputSum,
    Request,
    SumOutput,
)
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics import trainers

LOOK_SECONDS = 2.0  # between two questions what has grown
GROWS = re.compile(r".*\.(jsonl|csv|tsv)|(.*/)?[^/]*tfevents[^/]*|profile/.*")


class GrowingFiles:
    """The files of one node that grow here as they do there."""

    def __init__(self, job: str, node: NodeRecord, outputs: Path) -> None:
        self.listing = Outputs(job=job, node=node.index)
        # Of a later attempt: the engine has cut off what came after the step that it goes on from.
        self.cut = range(node.first_rank, node.first_rank + node.nproc) if node.first_job else ()
        self.outputs = outputs
        self.folder = Folder(outputs, private=True)
        self.ours: set[str] = set()  # paths that this node fills
        self.foreign: set[str] = set()  # paths that hold something else here
        self.grown: set[str] = set()  # paths of which what the node has is right
        self.next_look = 0.0
        self.asked = False
        self.questions: deque[Request[Any]] = deque()

    def all_grown(self) -> set[str]:
        """Return the paths of which what the node has is right."""
        return self.ours | self.grown

    def was_cut(self, path: str) -> bool:
        """Tell whether it is a file of this node that may be shorter than it was here."""
        known = trainers.of_name(path)
        return known is not None and known[1] in self.cut

    def begin(self) -> None:
        """Begin anew, after a connection that broke with a question on its way."""
        self.questions.clear()
        self.asked, self.next_look = False, time.monotonic() + LOOK_SECONDS

    def question(self) -> Request[Any] | None:
        """Return what is to be asked next, if it is time and nothing is on its way."""
        if self.asked:
            return None
        if not self.questions and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self.questions.append(self.listing)
        self.asked = bool(self.questions)
        return self.questions.popleft() if self.questions else None

    def refused(self, request: Request[Any] | None) -> None:
        if isinstance(request, (Outputs, Output, SumOutput)):
            self.asked = False

    def answered(self, request: Request[Any], answer: Message) -> None:
        """Take an answer to one of these questions; another one is none of our business."""
        try:
            if isinstance(answer, OutputFiles):
                self._look(answer)
            elif isinstance(request, Output) and isinstance(answer, OutputPiece):
                self._append(request, answer.data)
            elif isinstance(request, SumOutput) and isinstance(answer, OutputSum):
                self._compare(request, answer)
            else:
                return
        except OSError:  # no room, or something else has the name: the end of the job tells
            self.foreign |= {request.path} if isinstance(request, (Output, SumOutput)) else set()
        self.asked = False

    def _look(self, listing: OutputFiles) -> None:
        for file in listing.files:
            grows = file.kind == "file" and plain(file.path) and GROWS.fullmatch(file.path)
            if grows and file.path not in self.foreign:
                self._begin(listing.place, file)

    def _begin(self, place: str, file: OutputFile) -> None:
        try:
            here = os.lstat(self.outputs / file.path).st_size
        except FileNotFoundError:
            here = 0
            self.ours.discard(file.path)  # somebody has deleted it
        except NotADirectoryError:
            return
        if self.was_cut(file.path):
            self.grown.add(file.path)
        if here >= file.size:
            return
        if here and file.path not in self.ours:
            self.questions.append(SumOutput(place=place, path=file.path, offset=0, size=here))
        else:
            self.questions.append(Output(place=place, path=file.path, offset=here))

    def _compare(self, request: SumOutput, answer: OutputSum) -> None:
        with files.open_plain(self.outputs / request.path) as file:
            known = files.digest(file.fileno(), 0, request.size)
        if (answer.sum, answer.size) != (known, request.size):
            if request.offset or not self.was_cut(request.path):
                self.foreign.add(request.path)
                return
            os.truncate(self.outputs / request.path, 0)
            self.ours.add(request.path)
            self.questions.append(Output(place=request.place, path=request.path, offset=0))
            return
        self.ours.add(request.path)
        offset = request.offset + request.size
        self.questions.append(Output(place=request.place, path=request.path, offset=offset))

    def _append(self, request: Output, data: bytes) -> None:
        if not data:
            return
        self.folder.make()
        parts = PurePosixPath(request.path).parts
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        if request.path not in self.ours:
            flags |= os.O_EXCL  # else another node fills it
        with self.folder.inside(parts[:-1]) as directory:
            descriptor = os.open(parts[-1], flags | os.O_CLOEXEC, 0o600, dir_fd=directory)
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                self.ours.add(request.path)
                if file.tell() != request.offset:
                    return  # somebody else writes here, too: the next look compares
                written = file.write(data)
        offset = request.offset + written
        self.questions.append(request.replace(offset=offset))
