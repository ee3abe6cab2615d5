"""Handle the updates of a job's nodes for the head that follows the job."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import replace
from functools import singledispatchmethod

from orchestrator.common.text import format_bytes
from orchestrator.head.events import of_job
from orchestrator.head.follow import verdict
from orchestrator.head.follow.followed_job import FollowedJob, NodeState
from orchestrator.head.follow.job_end import Outcome
from orchestrator.head.follow.monitors.watchers import OPEN_ALL
from orchestrator.head.follow.streams.updates import (
    Connected,
    DiskFull,
    Failed,
    Happened,
    Lost,
    NodeUpdate,
    Over,
    Warned,
    Wrote,
)
from orchestrator.head.follow.verdict import Failure
from orchestrator.head.screen.events import tell
from orchestrator.head.transfer.home import CodeOutputs
from orchestrator.node.machine import nvidia
from orchestrator.protocol import events
from orchestrator.protocol.events import UNSAVED, Event
from orchestrator.records.outcome import Receipt, SlowRank

log = logging.getLogger(__name__)

# From this offset on the user is warned, because the times in the node's log are misleading.
CLOCK_IS_OFF_SECONDS = 2.0
NOT_BEGUN = "its part of the job had not begun, and it is not started any more"


class Reports:
    """Handles the updates of the nodes: events of supervisors and changes of connections.

    `has_other_heads`: other nodes of the job have heads of their own.
    """

    def __init__(self, job: FollowedJob, *, has_other_heads: bool = False) -> None:
        self.job, self.has_other_heads = job, has_other_heads
        self.nodes = {state.record.index: state for state in job.nodes}
        # The files that were written beside the code, by node index.
        self.code_outputs: dict[int, CodeOutputs] = {}

    def handle(self, updates: NodeUpdate) -> None:
        self.take(updates, self.nodes[updates.node])

    # -- updates of a connection, by type ---------------------------------------------------------

    @singledispatchmethod
    def take(self, updates: NodeUpdate, node: NodeState) -> None:
        """Handle an update of a node."""
        raise TypeError(f"nothing handles {type(updates).__name__}")

    @take.register(Connected)
    def _(self, updates: Connected, node: NodeState) -> None:
        self.set_clock(node, updates.clock)
        if node.lost_since:
            tell(of_job.NodeIsBack(node.who, node.away))
        node.lost_since = 0.0

    @take.register(Lost)
    def _(self, updates: Lost, node: NodeState) -> None:
        if not node.lost_since:
            node.lost_since, node.silent = time.monotonic(), updates.silent
            tell(of_job.NodeLost(node.who, updates.why))
        node.lost_why = updates.why

    @take.register(Warned)
    def _(self, updates: Warned, node: NodeState) -> None:
        tell(of_job.NodeWarns(updates.node, updates.what))
        if updates.receipt is not None:
            of = {"node": node.record.name, "job": self.job.record.job}
            self.not_ended(Receipt(**{**vars(updates.receipt), **of}))

    @take.register(Wrote)
    def _(self, updates: Wrote, node: NodeState) -> None:
        self.code_outputs[updates.node] = updates.with_code

    @take.register(DiskFull)
    def _(self, updates: DiskFull, node: NodeState) -> None:
        self.job.disk_full()

    @take.register(Over)
    def _(self, updates: Over, node: NodeState) -> None:
        """Close a node; if its last event is missing, `update.why` says what happened to it."""
        begun = node.record.state != "starting"
        node.close()
        self.job.changed = True
        if node.ended is None and not begun:
            self.job.failed(node.failure(time.time(), "start", f"{NOT_BEGUN} ({updates.why})"))
        elif node.ended is None:
            self.job.failed(node.failure(time.time(), "supervisor", updates.why))
        elif left := node.ended.left:
            self.not_ended(Receipt(node=node.record.name, job=self.job.record.job, left=left))
            what = f"processes {list(left)} do not end (stuck in the kernel?)"
            tell(of_job.NodeWarns(node.record.index, what))

    @take.register(Failed)
    def _(self, updates: Failed, node: NodeState) -> None:
        raise updates.error

    # -- the events of a supervisor, by type ------------------------------------------------------

    @take.register(Happened)
    def _(self, updates: Happened, node: NodeState) -> None:
        event = updates.event
        self.job.changed = True
        node.note_time(event)
        if node.notes(event):
            self.take_event(event, node)

    @singledispatchmethod
    def take_event(self, event: Event, node: NodeState) -> None:
        """Handle an event; most events need only note_time()."""

    @take_event.register(events.Started)
    def _(self, event: events.Started, node: NodeState) -> None:
        log.info("%s: its supervisor has started torchrun", node.who)
        node.record = replace(node.record, state="running")

    @take_event.register(events.GpuReport)
    def _(self, event: events.GpuReport, node: NodeState) -> None:
        """Warn of a broken GPU once per node; a later hang or lost connection is blamed on it."""
        for xid in nvidia.find_xids(event.line):
            if node.broken_gpu is None:
                node.broken_gpu = xid
                tell(of_job.GpuFailed(node.who, str(xid)))

    @take_event.register(events.LeaseFormed)
    def _(self, event: events.LeaseFormed, node: NodeState) -> None:
        if not event.active:
            tell(of_job.PeerUnreachable(node.who, event.why, OPEN_ALL))

    @take_event.register(events.Ending)
    def _(self, event: events.Ending, node: NodeState) -> None:
        node.grace, node.asked_at, node.stuck = event.grace, event.time, event.stuck or {}
        if self.job.end.open:
            self.ending(node, event)
        elif self.job.end.outcome is Outcome.FAILED:
            self.lost_before(event)

    @take_event.register(events.Ended)
    def _(self, event: events.Ended, node: NodeState) -> None:
        node.ended = event
        # Output that the disk refused earlier is mentioned in the log itself.
        if event.lost:
            tell(of_job.OutputLost(node.who, format_bytes(event.lost)))
        self.tell_what_was_killed(node, event)
        if event.swept and self.job.end.open:
            self.job.failed(node.failure(event.time, "supervisor", event.why))
        elif event.agent != 0 and not event.why and not event.swept:
            failure = verdict.failure_of_torchrun(node.record.index, node.record.name, event)
            if self.job.end.open:
                self.job.failed(failure)
            elif event.agent == -signal.SIGKILL:
                # A failure on another node does not send SIGKILL to torchrun, so this is a cause.
                self.job.failures.append(failure)

    @take_event.register(events.RankEnded)
    def _(self, event: events.RankEnded, node: NodeState) -> None:
        if event.code == 0:
            self.rank_done(event, node)
        elif not event.asked:
            message = node.ranks[event.rank].words or ""
            index, name = node.record.index, node.record.name
            self.job.failed(verdict.failure_of_rank(index, name, event, message))

    @take_event.register(events.RankSlow)
    def _(self, event: events.RankSlow, node: NodeState) -> None:
        """Record a checkpoint that is not being saved, or GPUs that are idle.

        If several nodes share a disk, one of them reports for all, and no machine is blamed.
        """
        own = event.node == node.record.index or 0 in node.record.numbers
        known = event.node in self.nodes and event.rank in node.record.numbers
        if not known or not (own or event.cause == UNSAVED):
            return
        slow = SlowRank(
            cause=event.cause,
            rank=event.who,
            node=event.node,
            step=event.step or None,
            text=event.text,
            time=None if event.step else event.time,
        )
        self.job.held_up(slow)

    # -- consequences -----------------------------------------------------------------------------

    def ending(self, node: NodeState, event: events.Ending) -> None:
        """Handle an end that a supervisor began without an order of this head."""
        if event.headless:
            tell(of_job.PartEnded(node.who, event.why))
        elif self.has_other_heads:
            self.ended_elsewhere(node, event)
        elif (loss := self.loss_of(event)) is None:
            return
        elif event.gone:
            self.job.failed(loss)
        else:
            self.job.give_up_on(loss)

    def loss_of(self, event: events.Ending) -> Failure | None:
        """Return the loss that a supervisor reports, dated back to the start of the silence."""
        if event.lost is None or not 0 <= event.lost < len(self.job.nodes):
            return None
        kind = "supervisor" if event.gone else "lost"
        return self.job.nodes[event.lost].failure(event.time - event.silent, kind, event.why)

    def lost_before(self, event: events.Ending) -> None:
        """Add the loss of a node that is reported after the failure of a rank which it caused."""
        loss = self.loss_of(event)
        if loss is None or self.has_other_heads:
            return
        self.job.failures.append(loss)
        if not event.gone and verdict.find_cause(self.job.failures) is loss:
            self.job.end.outcome = Outcome.LOST

    def ended_elsewhere(self, node: NodeState, event: events.Ending) -> None:
        """Handle a failure on a node that another head follows (run-node)."""
        if event.failed or event.lost is not None:
            self.job.end.outcome = Outcome.FAILED if event.lost is None else Outcome.LOST
            self.job.display.mute()
            tell(of_job.EndedElsewhere(event.why))
            self.job.failures.append(node.failure(event.time, "elsewhere", event.why))

    def tell_what_was_killed(self, node: NodeState, event: events.Ended) -> None:
        """Warn of killed ranks, whose unsaved state is lost, and of shared memory that is left."""
        if event.shared_memory:
            tell(of_job.SharedMemoryStays(node.who, ", ".join(event.shared_memory)))
        ranks = {rank.pid: f"rank {number}" for number, rank in event.ranks.items() if rank.pid}
        unsaved = {pid: ranks[pid] for pid in event.killed if pid in ranks}
        if unsaved and self.job.end.outcome is Outcome.STOPPED and node.grace:
            waited = min(node.grace, round(max(0.0, event.time - node.asked_at), 1))
            tell(of_job.RanksKilled(node.who, ", ".join(unsaved.values()), waited))

    @take_event.register(events.RankFinished)
    def rank_done(self, event: events.RankFinished | events.RankEnded, node: NodeState) -> None:
        # A rank closes its connections before it ends, so others may fail before its end is seen.
        if not event.asked:
            reason = "ended with exit code 0 while others waited for it"
            self.job.failures.append(node.failure(event.time, "ended_early", reason, event.rank))

    def not_ended(self, receipt: Receipt) -> None:
        """Record that a node did not prove its end, so that `stop` asks it again."""
        if not receipt.proved:
            receipts = {**self.job.record.receipts, receipt.node: receipt}
            self.job.record = replace(self.job.record, receipts=receipts)

    def set_clock(self, node: NodeState, offset: float) -> None:
        noted = offset if abs(offset) > CLOCK_IS_OFF_SECONDS else 0.0
        if abs(noted - node.record.clock) <= CLOCK_IS_OFF_SECONDS:
            return
        if noted:
            what = f"{abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
            tell(of_job.ClockIsOff(node.record.index, what))
        node.record = replace(node.record, clock=noted)
        self.job.changed = True
