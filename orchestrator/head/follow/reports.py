"""Takes what the nodes of a job report to the head that follows it, and acts on it."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import replace

from orchestrator.common.text import size
from orchestrator.head.follow import verdict
from orchestrator.head.follow.followed_job import FollowedJob, NodeState
from orchestrator.head.follow.job_end import Outcome
from orchestrator.head.follow.monitors.dial_monitors import OPEN_ALL
from orchestrator.head.follow.streams.follower import (
    ClockRead,
    Connected,
    DiskFull,
    Failed,
    Happened,
    LossLost,
    Lost,
    News,
    Over,
    Unknown,
    Warned,
    Wrote,
)
from orchestrator.head.follow.streams.printed import LostLoss
from orchestrator.head.follow.verdict import Failure
from orchestrator.head.screen.styles import DONE, styled
from orchestrator.head.transfer.fetch.home import CodeOutputs
from orchestrator.node.machine.gpus import nvidia
from orchestrator.protocol import events
from orchestrator.protocol.events import PROLOG, Event, RankState
from orchestrator.protocol.reports import UNSAVED
from orchestrator.records.outcome import Receipt, SlowRank

log = logging.getLogger(__name__)

CONTAINER_SECONDS = 10.0  # a daemon that starts anew keeps its containers, and lets nobody in
MOST_SAID, LONGEST_WORDS = 1000, 4000  # of one node's that a terminal, or a history, has
CLOCK_IS_OFF_SECONDS = 2.0  # worth a word, because the log's own times will mislead
NOT_BEGUN = "its part of the job had not begun, and nobody starts it any more"


class Reports:
    """Takes what nodes report: the events of a supervisor, and what happens to a connection.

    `has_other_heads`: other nodes of the job have heads of their own.
    """

    def __init__(self, job: FollowedJob, *, has_other_heads: bool = False) -> None:
        self.job, self.has_other_heads = job, has_other_heads
        self.nodes = {state.record.index: state for state in job.nodes}
        self.not_forked: set[str] = set()  # reasons that were said
        self.lost_loss: LostLoss | None = None  # the earliest that was said
        self.code_outputs: dict[int, CodeOutputs] = {}  # node -> what was written beside the code
        self.own_disks = False  # a node has outputs of its own, which came home

    def handle(self, news: News) -> None:
        node = self.nodes[news.node]
        if isinstance(news, Happened):
            self.happened(node, news.event)
        elif isinstance(news, Lost):
            self.lost(node, news)
        elif isinstance(news, Connected):
            self.set_clock(node, news.clock)
            if node.lost_since:
                log.info("%s is back after %.1f s", node.who, node.away)
                self.job.say(styled(f"{node.who} is back after {node.away:.0f} s", DONE))
            node.lost_since = node.outside_since = node.awaited = 0.0
        elif isinstance(news, ClockRead):
            self.set_clock(node, news.clock)
        elif isinstance(news, Warned):
            self.warned(node, news)
        elif isinstance(news, LossLost):
            self.loss_lost(node, news.what)
        elif isinstance(news, Wrote):
            self.wrote(node, news)
        elif isinstance(news, DiskFull):
            self.job.disk_full()
        elif isinstance(news, Over):
            self.over(node, "its supervisor was killed")
        elif isinstance(news, Unknown):
            self.over(node, f"has no such job: {news.why}")
        elif isinstance(news, Failed):
            raise news.error

    def happened(self, node: NodeState, event: Event) -> None:
        when = event.time - node.clock
        node.note_time(event)
        if isinstance(event, events.RankSlow):
            self.held_up(node, event)
        elif isinstance(event, events.RankEvent):
            self.of_rank(node, event, when)
        elif isinstance(event, events.Started):
            log.info("%s: its supervisor has started torchrun", node.who)
            node.record = replace(node.record, state="running")
        elif isinstance(event, events.CommandFailed):
            self.command_failed(node, event, when)
        elif isinstance(event, events.GpuReport):
            self.broken_gpu(node, event)
        elif isinstance(event, events.LeaseFormed):
            if not event.active:
                self.warn_of(
                    node,
                    f"{node.who} cannot reach node 0's supervisor ({event.why}): without a head,"
                    " an end on one will not be an end on the other. If that is a firewall, ranks"
                    f" that connect to each other hang, too: {OPEN_ALL}",
                )
        elif isinstance(event, events.Ending):
            node.grace, node.asked_at = event.grace, event.time
            if self.job.end.open:
                self.ending(node, event, when)
            elif self.job.end.outcome is Outcome.FAILED:
                self.lost_before(node, event, when)
        elif isinstance(event, events.Ended):
            self.ended(node, event, when)
        self.job.changed = True

    def held_up(self, node: NodeState, event: events.RankSlow) -> None:
        """Take who holds the others up from rank 0, or from the node that does so itself.

        Of a disk that several nodes share, one of them tells for all: no machine is blamed then.
        """
        own = event.node == node.record.index or 0 in node.record.numbers
        known = event.node in self.nodes and event.rank in node.record.numbers
        if not known or not (own or event.cause == UNSAVED) or self.said(node):
            return
        slow = SlowRank(
            cause=event.cause[:LONGEST_WORDS],
            rank=event.who,
            node=event.node,
            step=event.step or None,
            text=event.text[:LONGEST_WORDS],
            # By its own clock: a new head, which hears it again, knows that it is the same.
            time=None if event.step else event.time,
        )
        self.job.held_up(slow, blames=own)

    def said(self, node: NodeState) -> bool:
        """Count what a node has to say; tell whether that is more than a job has."""
        node.said += 1
        return node.said > MOST_SAID

    def warn_of(self, node: NodeState, text: str) -> None:
        if not self.said(node):
            self.job.warn(text[:LONGEST_WORDS])

    def of_rank(self, node: NodeState, event: events.RankEvent, when: float) -> None:
        """Take what happened to a rank of this node, the first time that it is told."""
        before = node.ranks.get(event.rank, RankState()).state
        if event.rank not in node.record.numbers or before in (
            "ended",
            event.event[len("rank_") :],
        ):
            return
        node.take(event)
        if isinstance(event, events.RankAfresh):
            self.say_not_forked(node, event)
        elif isinstance(event, events.RankFinished):
            self.rank_done(node, event, when)
        elif isinstance(event, events.RankEnded):
            self.rank_ended(node, event, when)

    def broken_gpu(self, node: NodeState, event: events.GpuReport) -> None:
        """Say it once for each node: of a job that hangs or loses a connection it is the cause."""
        for xid in nvidia.xids(event.line):
            if node.broken_gpu is None:
                node.broken_gpu = xid
                self.job.warn(f"{node.who}: {xid}; what uses that GPU will fail, or wait for ever")

    def command_failed(self, node: NodeState, event: events.CommandFailed, when: float) -> None:
        """Take a failed prolog for the cause; what the epilog should do is no part of the job."""
        failure = verdict.of_command(node.record.index, node.record.name, event, when)
        if event.name == PROLOG:
            if not self.said(node):
                self.job.failed(failure)
        else:
            self.warn_of(node, f"{node.who}: {failure.message}")

    def loss_lost(self, node: NodeState, lost: LostLoss) -> None:
        """Say that a program, which did not notice, goes on without a loss: the earliest rank."""
        if self.lost_loss is None or lost.step < self.lost_loss.step:
            self.lost_loss = lost
            self.job.warn(
                f"rank {lost.rank} on {node.who} prints a loss that is NaN or infinite, from step"
                f" {lost.step} on; the job continues: `orchestrator stop` ends it"
            )

    def say_not_forked(self, node: NodeState, event: events.RankAfresh) -> None:
        """Say why ranks were not forked, once for all of them."""
        if event.why not in self.not_forked:
            self.not_forked.add(event.why)
            self.warn_of(node, f"rank {event.rank} is started afresh, not forked: {event.why}")

    def ending(self, node: NodeState, event: events.Ending, when: float) -> None:
        """Handle an end that a supervisor began, and that this head did not order."""
        if event.headless:
            self.warn_of(node, f"{node.who} ended its part: {event.why}")
        elif self.has_other_heads:
            self.ended_elsewhere(node, event, when)
        elif (loss := self.loss_of(event, when)) is None:
            return
        elif event.gone:
            self.job.failed(loss)
        else:
            self.job.give_up_on(loss)

    def loss_of(self, event: events.Ending, when: float) -> Failure | None:
        """Return the node that a supervisor took for lost, as a failure that began in silence."""
        if event.lost is None or not 0 <= event.lost < len(self.job.nodes):
            return None
        kind = "supervisor" if event.gone else "lost"
        return self.job.nodes[event.lost].failure(when - event.silent, kind, event.why)

    def lost_before(self, node: NodeState, event: events.Ending, when: float) -> None:
        """Take the loss of a node that is heard of after a rank that failed by it, as the cause."""
        loss = self.loss_of(event, when)
        if loss is None or self.has_other_heads or self.said(node):
            return
        self.job.failures.append(loss)
        if not event.gone and verdict.cause(self.job.failures) is loss:
            self.job.end.outcome = Outcome.LOST

    def ended_elsewhere(self, node: NodeState, event: events.Ending, when: float) -> None:
        """Handle a failure on a node that another head follows (run-node)."""
        if event.failed or event.lost is not None:
            self.job.end.outcome = Outcome.FAILED if event.lost is None else Outcome.LOST
            self.job.display.mute()
            self.job.warn(f"{event.why}; this node ends its part")
            self.job.failures.append(node.failure(when, "elsewhere", event.why))

    def ended(self, node: NodeState, event: events.Ended, when: float) -> None:
        if self.said(node):
            return
        node.ended = event
        self.say_what_was_lost(node, event)
        self.say_what_was_killed(node, event)
        if event.swept and self.job.end.open:
            self.job.failed(node.failure(when, "supervisor", event.why))
        elif event.agent != 0 and not event.why and not event.swept:
            failure = verdict.of_torchrun(node.record.index, node.record.name, event, when)
            if self.job.end.open:
                self.job.failed(failure)
            elif event.agent == -signal.SIGKILL:  # no failure elsewhere kills it
                self.job.failures.append(failure)

    def say_what_was_lost(self, node: NodeState, event: events.Ended) -> None:
        """Say what its log ends without; what a disk refused earlier, the log says by itself."""
        if event.lost:
            self.job.warn(
                f"{node.who}: the last {size(event.lost)} of output are in no log: there was no"
                " room for them on the disk of ~/.orchestrator there (`df -h ~`, `quota`)"
            )

    def say_what_was_killed(self, node: NodeState, event: events.Ended) -> None:
        """Say what did not end by itself: what it had not saved is lost."""
        if event.left_behind:
            self.job.warn(
                f"{node.who}: ended what ranks had left running: {listed(event.left_behind)}"
            )
        ranks = {rank.pid: f"rank {number}" for number, rank in event.ranks.items() if rank.pid}
        unsaved = {pid: ranks[pid] for pid in event.killed if pid in ranks}
        if unsaved and self.job.end.outcome is Outcome.STOPPED and node.grace:
            who = ", ".join(unsaved.values())
            waited = min(node.grace, round(max(0.0, event.time - node.asked_at), 1))
            self.job.warn(f"{node.who}: killed {who}: still there {waited:g} s after it was asked")

    def rank_done(
        self, node: NodeState, event: events.RankFinished | events.RankEnded, when: float
    ) -> None:
        # It closes its connections between its last line and its end: others may fail before that.
        if not event.asked:
            reason = "ended with exit code 0 while others waited for it"
            self.job.failures.append(node.failure(when, "ended_early", reason, event.rank))

    def rank_ended(self, node: NodeState, event: events.RankEnded, when: float) -> None:
        if event.code == 0:
            self.rank_done(node, event, when)
        elif not event.asked:
            message = node.ranks[event.rank].words or ""
            index, name = node.record.index, node.record.name
            self.job.failed(verdict.of_rank(index, name, event, when, message))

    def over(self, node: NodeState, otherwise: str) -> None:
        """Close a node; without a last event, `otherwise` is what happened to it."""
        begun = node.record.state != "starting"
        node.close()
        self.job.changed = True
        if node.ended is None and not begun:
            self.job.failed(node.failure(time.time(), "start", f"{NOT_BEGUN} ({otherwise})"))
        elif node.ended is None:
            self.job.failed(node.failure(time.time(), "supervisor", otherwise))
        elif node.ended.left:
            left = list(node.ended.left)
            self.not_ended(Receipt(node.record.name, self.job.record.job, left=node.ended.left))
            self.job.warn(
                f"node {node.record.index}: processes {left} do not end (stuck in the kernel?)"
            )

    def warned(self, node: NodeState, news: Warned) -> None:
        self.warn_of(node, f"node {news.node}: {news.what}")
        if news.receipt is not None:
            of = {"node": node.record.name, "job": self.job.record.job}
            self.not_ended(Receipt(**{**vars(news.receipt), **of}))

    def not_ended(self, receipt: Receipt) -> None:
        """Keep that a node did not prove its end: `stop` asks there again."""
        if not receipt.proved:
            receipts = {**self.job.record.receipts, receipt.node: receipt}
            self.job.record = replace(self.job.record, receipts=receipts)

    def wrote(self, node: NodeState, news: Wrote) -> None:
        self.own_disks = self.own_disks or news.own_disk
        if news.with_code is not None:
            self.code_outputs[news.node] = news.with_code

    def set_clock(self, node: NodeState, offset: float) -> None:
        if abs(offset) > CLOCK_IS_OFF_SECONDS and abs(offset - node.clock) > CLOCK_IS_OFF_SECONDS:
            what = f"{abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
            self.job.warn(
                f"the clock of node {node.record.index} is {what}; its times are corrected"
            )
        node.clock = offset
        noted = offset if abs(offset) > CLOCK_IS_OFF_SECONDS else 0.0
        if abs(noted - node.record.clock) > CLOCK_IS_OFF_SECONDS:
            node.record = replace(node.record, clock=noted)
            self.job.changed = True

    def lost(self, node: NodeState, news: Lost) -> None:
        if not node.lost_since:
            node.lost_since, node.silent = time.monotonic(), news.silent
            self.job.warn(f"{node.who}: {news.why}; trying to come back")
        node.lost_why = news.why
        if not news.outside:
            node.outside_since = 0.0
        elif not node.outside_since:
            node.outside_since = time.monotonic()
            self.job.warn(
                f"{node.who}: {news.why}; it is lost if that is so for {CONTAINER_SECONDS:g} s"
            )


def listed(processes: dict[int, str]) -> str:
    return ", ".join(f"{name} (process {pid})" for pid, name in processes.items())
