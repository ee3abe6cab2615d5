"""Follow one node: append its log to the local file, post its events, reconnect when needed.

The local file's length is the only state: a new process goes on where a killed one stopped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import singledispatchmethod
from typing import Any

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import (
    Declined,
    NodeChannel,
    Silent,
    nonsense_error,
    read_message,
)
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.streams.node_logs import AppendOnly, NodeLogs, log_files
from orchestrator.head.follow.streams.printed import Printed
from orchestrator.head.follow.streams.updates import (
    Answer,
    Connected,
    DiskFull,
    Failed,
    Grew,
    Happened,
    Lost,
    NodeUpdate,
    Over,
    Warned,
    Wrote,
)
from orchestrator.head.transfer import home
from orchestrator.head.transfer.growing import GrowingFiles
from orchestrator.protocol import events
from orchestrator.protocol.events import Ended
from orchestrator.protocol.frames import EVENTS, LOG, OFFSET, RANKS
from orchestrator.protocol.message import Nonsense, parse_object
from orchestrator.protocol.requests.follow import (
    End,
    Follow,
    Stop,
    Stuck,
)
from orchestrator.protocol.requests.machine import Dialed
from orchestrator.protocol.requests.request import (
    OTHER_VERSION,
    UNKNOWN_JOB,
    Answered,
    Clock,
    Heartbeat,
    Ping,
    Refused,
    Request,
    SupervisorGone,
)
from orchestrator.protocol.timing import (
    DEATH_SECONDS,
    HEAD_BEAT_SECONDS,
    HEAD_PATIENCE_SECONDS,
)
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

SILENCE = f"no word for {HEAD_PATIENCE_SECONDS:.0f} s"
log = logging.getLogger(__name__)

# The pause between two tries to reach a node.
PAUSE_SECONDS = 0.5
GIVE_SECONDS = 2.0
# These limits bound a head's load: a frame takes 0.2 to 0.4 ms, a line with a step 0.05 ms.
# Nodes gather lines that come fast, so that together they send about this many frames.
FRAMES_PER_SECOND = 200
LONGEST_GATHER_SECONDS = 0.5
# The bytes per second that are searched for steps: in node 0's log, and in all others together.
PRINTED_BYTES = 512 << 10


class NodeFollower:
    """Follows one node in a thread until the job has ended there, or until close()."""

    def __init__(
        self,
        ssh: Transport,
        record: JobRecord,
        node: NodeRecord,
        experiment: Experiment,
        post: Callable[[NodeUpdate], None],
        channel: NodeChannel | None = None,
        *,
        logs: NodeLogs | None = None,
        looks_on: bool = True,
    ) -> None:
        self.ssh, self.record, self.node = ssh, record, node
        logs = logs or NodeLogs.of(experiment, node)
        self.text, self.ranks = logs.text, logs.ranks
        self.outputs = experiment.path / "outputs"
        self.growing = GrowingFiles(record.job, node, self.outputs)
        [log] = log_files(experiment, [node])
        self.printed = Printed(
            log,
            experiment.path,
            node.numbers,
            PRINTED_BYTES // (len(record.nodes) if node.index else 1),
            attempt=record.attempt,
            begin=node.log_before,
        )
        self.post = post
        self.channel = channel
        # True for an observer: it does not renew the job's lease.
        self.looks_on = looks_on
        self.gather = min((len(record.nodes) - 1) / FRAMES_PER_SECOND, LONGEST_GATHER_SECONDS)
        self.writing = threading.Lock()
        self.ended = self.over = False
        self.event_rest = b""
        self.closing = threading.Event()
        self.thread: threading.Thread | None = None
        # The order to end that was sent to the node.
        self.order: End | None = None
        self.next_beat = 0.0
        self.heard_at = time.monotonic()
        # The seconds since the node last printed, and since its ranks last made progress.
        self.silent = self.idle = 0.0
        # The node's clock minus this machine's.
        self.ahead = 0.0

    def start(self) -> None:
        self.thread = fleet.start_thread(self.run)

    def end(self, reason: str, grace: float, *, failed: bool) -> None:
        """Order the node to end its part: now, or as soon as it is connected again."""
        log.debug("%s: is to end: %s; grace %g s", self.node.name, reason, grace)
        self.order = End(
            job=self.record.job,
            part=self.node.part,
            attempt=self.record.attempt,
            why=reason,
            grace=grace,
            failed=failed,
        )
        # If the connection is broken, the order is repeated after the reconnect.
        self.ask(self.order)

    def ask(self, request: Request[Any] | None) -> None:
        """Send a request if there is a connection; the answer arrives with the stream."""
        channel = self.channel
        if channel is not None and request is not None:
            # The stream notices a broken connection by itself.
            with contextlib.suppress(NodeError):
                channel.post(request)

    def close(self) -> None:
        """Stop following; the job goes on. After the return nothing more is written to the logs."""
        self.closing.set()
        with self.writing:
            pass
        channel = self.channel
        if channel is not None:
            channel.connection.close()

    def give_channel(self) -> NodeChannel | None:
        """Return the channel of a node that is over, for the next attempt; None if it is in use."""
        if self.thread is not None:
            self.thread.join(GIVE_SECONDS)
        if not self.over or (self.thread is not None and self.thread.is_alive()):
            return None
        channel, self.channel = self.channel, None
        return channel

    def run(self) -> None:
        try:
            while not self.closing.is_set():
                if self._follow_once():
                    return
        # A defect of this program: the run raises it again.
        except Exception as error:  # noqa: BLE001
            self.post(Failed(self.node.index, error))
        finally:
            self.text.close()
            self.ranks.close()

    def _follow_once(self) -> bool:
        """Follow until the job has ended there (return True) or the connection is lost (False)."""
        try:
            if self.channel is None:
                self.channel = self._reopen()
                # The follower may have been closed during the reconnect.
                if self.closing.is_set():
                    self.channel.connection.close()
                    return True
            self._begin(self.channel)
            self.ask(self.order)
            self._stream(self.channel)
            if not self.ended:
                self._sweep(self.channel)
            self._read_printed(last=True)
            self._bring_outputs(self.channel)
            self.over = True
            log.info("%s: its part is over, and all files are here", self.node.name)
            self.post(Over(self.node.index))
            return True
        except OrchestratorError as error:
            log.debug("%s: the stream has ended: %s", self.node.name, error)
            if self.closing.is_set():
                return True
            kind = error.kind if isinstance(error, Declined) else ""
            if kind == UNKNOWN_JOB:
                self.post(Over(self.node.index, f"has no such job: {error.what}"))
                return True
            if kind == OTHER_VERSION:
                self.post(Failed(self.node.index, error))
                return True
            channel, self.channel = self.channel, None
            if channel is not None:
                channel.connection.close()
            # A longer silence means that this process was suspended.
            silence = min(HEAD_PATIENCE_SECONDS, time.monotonic() - self.heard_at)
            log.info("%s: lost: %s; tried again soon", self.node.name, error.what)
            self.post(Lost(self.node.index, error.what, silence))
            self.closing.wait(PAUSE_SECONDS)
            return False

    def _bring_outputs(self, channel: NodeChannel) -> None:
        try:
            since = (self.record.former_end, self.record.former_end + self.ahead)
            said, with_code = home.bring_outputs(channel, self.growing, since)
            if with_code is not None:
                self.post(Wrote(self.node.index, with_code))
        except OSError as error:
            said = [f"its outputs stay there: {self.outputs}: {error.strerror}"]
        except Declined as error:
            said = [f"its outputs stay there: {error.what}"]
        for what in said:
            self.post(Warned(self.node.index, what))

    def _sweep(self, channel: NodeChannel) -> None:
        """End the processes of a supervisor that is gone and sent no last event."""
        order = Stop(
            job=self.record.job,
            part=self.node.part,
            attempt=self.record.attempt,
            why="its supervisor was killed",
            grace=0.0,
            wait=DEATH_SECONDS,
            # The job may be started again.
            for_good=False,
        )
        receipt = channel.ask(order, 3 * DEATH_SECONDS)
        if receipt.left:
            found = f"processes {list(receipt.left)} do not end"
            self.post(Warned(self.node.index, f"{order.why}: {found}", receipt))

    def _reopen(self) -> NodeChannel:
        log.debug("%s: connecting again", self.node.name)
        return open_channel(self.ssh.connect(self.node), self.node, self.ssh.timeout)

    def _begin(self, channel: NodeChannel) -> None:
        self.event_rest = b""
        self.growing.begin()
        # This tells the clock's time, which later heartbeats tell more precisely.
        channel.ask(Ping(), HEAD_PATIENCE_SECONDS)
        self.next_beat = time.monotonic() + HEAD_BEAT_SECONDS
        request = Follow(
            job=self.record.job,
            part=self.node.part,
            attempt=self.record.attempt,
            log=self.text.size,
            ranks=self.ranks.size,
            events=0,
            head=not self.looks_on,
            gather=self.gather,
        )
        channel.ask(request, HEAD_PATIENCE_SECONDS)
        self.ahead = channel.clock.offset
        log.debug("%s: is followed; its clock is %.3f s ahead", self.node.name, self.ahead)
        self.post(Connected(self.node.index, self.ahead))

    def _stream(self, channel: NodeChannel) -> None:
        self.heard_at = time.monotonic()
        while True:
            self._read_printed()
            self._ask_what_is_due(channel)
            try:
                kind, size = channel.header(self._due(), SILENCE)
            except Silent:
                if time.monotonic() - self.heard_at < HEAD_PATIENCE_SECONDS:
                    continue
                raise
            self.heard_at = time.monotonic()
            deadline = self.heard_at + 2 * HEAD_PATIENCE_SECONDS
            if kind in (LOG, RANKS):
                self._append(channel, self.text if kind == LOG else self.ranks, size)
                continue
            data = channel.exactly(size, deadline, SILENCE)
            if kind == EVENTS:
                self._take_events(data)
                continue
            message = read_message(data)
            if isinstance(message, SupervisorGone):
                return
            self._take(message, channel)

    def _read_printed(self, *, last: bool = False) -> None:
        # After close() another head may read on.
        with self.writing:
            if not self.closing.is_set():
                self.printed.check(self.ahead, last=last)

    def _due(self) -> float:
        """Return the time of the next scheduled action."""
        lost = self.heard_at + HEAD_PATIENCE_SECONDS
        return min(self.next_beat, self.growing.due, self.printed.due, lost)

    def _ask_what_is_due(self, channel: NodeChannel, *, updates: bool = True) -> None:
        """Send a heartbeat when due, and with `updates` the request for grown output files."""
        now = time.monotonic()
        if now >= self.next_beat:
            self.next_beat = now + HEAD_BEAT_SECONDS
            channel.post(Ping())
        if updates and (question := self.growing.question()) is not None:
            channel.post(question)

    # -- messages between the pieces of the stream, by type ---------------------------------------

    @singledispatchmethod
    def _take(self, message: object, channel: NodeChannel) -> None:
        """Handle a message; one that no method below is for needs nothing."""

    @_take.register(Heartbeat)
    def _(self, message: Heartbeat, channel: NodeChannel) -> None:
        self.silent, self.idle = message.silent or 0.0, message.idle or 0.0

    @_take.register(Answered)
    def _(self, message: Answered, channel: NodeChannel) -> None:
        request, answer = channel.answer_of(message)
        self._take(answer, channel)
        self.growing.answered(request, answer)

    @_take.register(Refused)
    def _(self, message: Refused, channel: NodeChannel) -> None:
        self.growing.refused(channel.refused(message))

    @_take.register(Stuck)
    @_take.register(Dialed)
    def _(self, message: Stuck | Dialed, channel: NodeChannel) -> None:
        self.post(Answer(self.node.index, message))

    @_take.register(Clock)
    def _(self, message: Clock, channel: NodeChannel) -> None:
        self.ahead = channel.clock.offset
        self.post(Connected(self.node.index, self.ahead))

    def _append(self, channel: NodeChannel, file: AppendOnly, size: int) -> None:
        head = channel.exactly(OFFSET.size, time.monotonic() + HEAD_PATIENCE_SECONDS, SILENCE)
        (offset,) = OFFSET.unpack(head)
        if offset != file.size:
            raise NodeError(f"it sent bytes from {offset} on, {file.size} are here")
        size -= OFFSET.size
        while size:
            data = channel.some(size, time.monotonic() + HEAD_PATIENCE_SECONDS, SILENCE)
            self._keep(channel, file, data)
            size -= len(data)
        self.printed.grew()
        self.post(Grew(self.node.index))

    def _keep(self, channel: NodeChannel, file: AppendOnly, data: memoryview) -> None:
        """Append to a log; wait while the local disk is full, as the node keeps all output."""
        while (data := self._write(file, data)) and not self.closing.wait(1.0):
            self.post(DiskFull(self.node.index))
            self._ask_what_is_due(channel, updates=False)

    def _write(self, file: AppendOnly, data: memoryview) -> memoryview:
        # After close() another follower may write to the file.
        with self.writing:
            return data if self.closing.is_set() else file.append(data)

    def _take_events(self, data: bytes) -> None:
        lines = (self.event_rest + data[OFFSET.size :]).split(b"\n")
        self.event_rest = lines.pop()
        try:
            for line in lines:
                try:
                    known = parse_object(line)
                except Nonsense:
                    # A crash or a full disk left the line incomplete.
                    continue
                event = events.event_from_data(known, self.ahead)
                self.ended = self.ended or isinstance(event, Ended)
                log.debug("%s: event %s", self.node.name, type(event).__name__)
                self.post(Happened(self.node.index, event))
        except Nonsense as error:
            raise nonsense_error(error) from error
