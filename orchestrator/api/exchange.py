"""Carry calls between a Python program and the ranks of its pool: a process between the two.

Frames come from the program through standard input and go to the channels of the nodes; what the
ranks answer goes to the program through standard output.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from functools import partial
from typing import Any

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import nonsense, read_message
from orchestrator.head.connect.reach import kept_if_well, serving
from orchestrator.head.connect.transport import Transport
from orchestrator.protocol import frames
from orchestrator.protocol.frames import (
    CALL,
    CLOSE,
    EVERY_RANK,
    GONE,
    HEADER,
    INTERRUPT,
    JSON,
    Splitter,
)
from orchestrator.protocol.message import Nonsense
from orchestrator.protocol.requests.follow import Call
from orchestrator.protocol.requests.request import Answered
from orchestrator.protocol.timing import HEAD_PATIENCE_SECONDS
from orchestrator.records.experiment import JobRecord, NodeRecord

READ_BYTES = 1 << 18
ASK_SECONDS = 20.0
END_SECONDS = 60.0  # for ranks that were told to end, as api/pool.py has it


class NodeCalls:
    """The channel to one node of the pool."""

    def __init__(self, transport: Transport, job: str, node: NodeRecord) -> None:
        self.node = node
        self.ranks = range(node.first_rank, node.first_rank + node.nproc)
        self.channel = serving(transport, node)
        with kept_if_well(self.channel):
            self.channel.ask(Call(job=job, node=node.index), ASK_SECONDS)

    def receive(self) -> bytes | None:
        """Return the next frame of a call, or None for one that only shows that the node lives."""
        deadline = time.monotonic() + HEAD_PATIENCE_SECONDS
        silence = f"silent for {HEAD_PATIENCE_SECONDS:.0f} s"
        kind, size = self.channel.header(deadline, silence)
        data = self.channel.exactly(size, deadline, silence)
        if kind == CALL:
            if frames.part(data).rank not in self.ranks:
                raise nonsense(Nonsense("an answer of another node's rank"))
            return frames.header(CALL, len(data)) + data
        message = read_message(data) if kind == JSON else None
        if isinstance(message, Answered):
            self.channel.answer_of(message)
        return None


class Exchange:
    """Calls go out to all nodes of a pool, and answers come in."""

    def __init__(self, nodes: list[NodeCalls], answers: int) -> None:
        self.nodes = nodes
        self.answers = answers  # file descriptor
        self.alive = {rank for node in nodes for rank in node.ranks}
        self.over = threading.Event()  # no rank is left
        self.writing = threading.Lock()  # a frame is written whole: each node has a task

    def run(self) -> None:
        """Carry frames until the program ends or hangs up; then the ranks are told to end.

        Nobody wants the calls that still run: a program that was killed could not interrupt them.
        """
        select.select([0], [], [])  # until then the program reads lines
        for node in self.nodes:
            fleet.start(partial(self.listen, node))
        try:
            self.forward()
        finally:
            for kind in (INTERRUPT, CLOSE):
                (frame,) = frames.call_frames(EVERY_RANK, 0, kind, b"")
                self.send(frame)
            self.over.wait(END_SECONDS)  # a connection that is closed at once may swallow it
            for node in self.nodes:
                node.channel.connection.close()

    def forward(self) -> None:
        splitter = Splitter()
        while data := os.read(0, READ_BYTES):
            for _, payload in splitter.feed(data):
                frame = frames.header(CALL, len(payload)) + payload
                self.send(frame, frames.part(payload).rank)

    def send(self, frame: bytes, rank: int = EVERY_RANK) -> None:
        for node in self.nodes:
            if rank == EVERY_RANK or rank in node.ranks:
                with contextlib.suppress(NodeError):  # listen() notices
                    node.channel.put_frame(frame)

    def listen(self, node: NodeCalls) -> None:
        while True:
            try:
                frame = node.receive()
            except NodeError as error:
                reason = f"{node.node.name}: {error.what}".encode(errors="replace")
                for rank in node.ranks:
                    for frame in frames.call_frames(rank, 0, GONE, reason):
                        self.write(frame)
                return
            if frame is not None:
                self.write(frame)

    def write(self, frame: bytes) -> None:
        part = frames.part(frame[HEADER.size :])
        if part.kind == GONE:
            self.alive.discard(part.rank)
            if not self.alive:
                self.over.set()
        with self.writing, contextlib.suppress(BrokenPipeError):  # standard input ends, too
            view = memoryview(frame)
            while view:
                view = view[os.write(self.answers, view) :]


def open_calls(transport: Transport, record: JobRecord, answers: int) -> Exchange:
    """Open a channel to every node of a pool's job."""

    def connect(node: NodeRecord) -> NodeCalls:
        return NodeCalls(transport, record.job, node)

    results: list[Any] = fleet.everywhere(record.nodes, connect)
    for result in results:
        if isinstance(result, OrchestratorError):
            raise result
    return Exchange(results, answers)
