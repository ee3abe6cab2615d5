"""Follows a job while it runs: what its nodes report, what the user wants, and how it ends.

Launch and attach both use it. One thread; followers and signals talk to it through a queue.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from orchestrator.common import interrupt
from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_NODE, EXIT_STOPPED
from orchestrator.common.text import size
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.follow import incidents, verdict
from orchestrator.head.follow import news as news_of
from orchestrator.head.follow.job_end import JobEnd, Outcome
from orchestrator.head.follow.monitors.hang_monitor import HangMonitor
from orchestrator.head.follow.monitors.link_monitor import LinkMonitor
from orchestrator.head.follow.monitors.slow_monitor import SlowMonitor
from orchestrator.head.follow.monitors.start_monitor import DIALS_WITHIN, OPEN_ALL, StartMonitor
from orchestrator.head.follow.news import News
from orchestrator.head.follow.node_state import NodeState
from orchestrator.head.follow.restarts import Restarts
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.head.screen.keyboard import KEYS, Keys
from orchestrator.head.screen.screen import Display
from orchestrator.head.transfer.fetch import home
from orchestrator.head.transfer.fetch.home import CodeOutputs
from orchestrator.protocol import events
from orchestrator.protocol.events import Event
from orchestrator.protocol.requests.follow import Paces, Stuck
from orchestrator.protocol.requests.machine import Listening
from orchestrator.protocol.timing import PEER_GRACE
from orchestrator.records import goodput, manifest
from orchestrator.records.experiment import RESIZED, Experiment, JobRecord, NodeRecord
from orchestrator.records.outcome import Head, SlowRank

SUCCESSOR_SECONDS = 0.5  # between two looks whether another head wants to take over
LEAVE_LIMIT = 3.0
CUT_OFF_SECONDS = 600.0
SAME_SIGNAL = 1.0  # between the ends of the ranks and the signal to their head
CONTAINER_SECONDS = 10.0  # a daemon that starts anew keeps its containers, and lets nobody in
CLOCK_IS_OFF = 2.0  # seconds: worth a word, because the log's own times will mislead


class Backend(Protocol):
    """The part of a job's backend that matters while the job is followed."""

    @property
    def signals(self) -> Sequence[int]:
        """Signals that ask the head to end the job, or to leave it (SIGHUP)."""

    @property
    def has_other_heads(self) -> bool:
        """Tell whether other nodes of the job have heads of their own."""

    def is_taken_back(self, record: JobRecord) -> bool:
        """Tell whether the scheduler ends the job in order to start it again."""

    def why_terminated(self, record: JobRecord) -> str:
        """Say why the scheduler ends the job, if it does so by itself."""


class Larger(Protocol):
    """A job that can go on with more nodes: why, and who stands by then."""

    @property
    def why(self) -> str: ...

    @property
    def spares(self) -> Sequence[NodeRecord]: ...


class Growth(Protocol):
    """Looks for nodes with which a job could go on; look() never waits."""

    def look(self, record: JobRecord) -> Larger | None: ...


class Run:
    """Follows a job: `go()` returns when it is over or left alone, with its state in `record`."""

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        display: Display,
        backend: Backend,
        *,
        left_behind: bool = False,
        straggler: Callable[[JobRecord, SlowRank], None] = lambda *_: None,
        growth: Growth | None = None,
    ) -> None:
        self.straggler = straggler  # who wants to hear of those that hold the others up
        self.restarts = Restarts(record)
        self.growth = growth  # for a job that runs on fewer nodes than it may have
        self.resized = ""  # why this attempt makes way for one with more nodes
        self.channels: dict[int, NodeChannel] = {}  # still open when all is over
        self.experiment = experiment
        self.record = record
        self.display = display
        self.backend = backend
        self.grace = record.launch.grace
        self.node_loss_timeout = record.launch.node_loss_timeout
        self.nodes = [NodeState(node, times=dict(node.times)) for node in record.nodes]
        self.followers: Sequence[NodeFollower] = ()
        self.hang_monitor = HangMonitor(
            record.launch.hang_timeout, experiment, record.job, self.say
        )
        self.slow_monitor = SlowMonitor(record.job, record.nodes, experiment.path / "outputs")
        # With a short limit the hang itself is found first, and is what was asked for.
        dials = not 0 < record.launch.hang_timeout < DIALS_WITHIN
        self.start_monitor = StartMonitor(record.master if dials else "")
        self.link_monitor = LinkMonitor(record.nodes)
        self.left_hanging = False
        self.inbox: queue.SimpleQueue[News | int] = queue.SimpleQueue()
        self.failures: list[Failure] = []
        self.end = JobEnd()
        self.left_behind = left_behind  # in the background, by a head that has left
        self.left_on_purpose = False
        self.interrupts = 0
        self.terminated = False  # by SIGTERM: by Slurm, too, which may have taken the job back
        self.taken_back = False
        self.out_of_time = False  # the reason of a stop: Slurm may start the job again
        self.since = time.time()
        self.successor: Head | None = None
        self.next_look = 0.0
        self.changed = True
        self.disk_is_full = False
        self.afresh: set[str] = set()  # reasons that were said
        self.beside: dict[int, CodeOutputs] = {}  # node -> what its ranks wrote beside their code

    # -- the loop ----------------------------------------------------------------------------

    def go(self, followers: Sequence[NodeFollower], typed: Keys | None = None) -> None:
        self.followers = followers
        before = {number: signal.getsignal(number) for number in self.backend.signals}
        for number in before:
            signal.signal(number, lambda signum, _: self.inbox.put(signum))
        for held in interrupt.release():
            self.inbox.put(held)
        try:
            with typed or Keys() as keys:
                for follower in followers:
                    follower.start()
                while not self.end.left and not all(n.over or n.given_up for n in self.nodes):
                    self.turn(keys)
                self.await_own_signal()
            self.channels = self.open_channels()
        finally:
            interrupt.hold()  # the job is over: only its record is still to be written
            for number, handler in before.items():
                signal.signal(number, handler)
            for follower in followers:
                follower.close()
        if not self.end.left:
            for line in home.where_it_is(self.beside, self.experiment.path / "outputs"):
                self.say(line)
            self.conclude()

    def open_channels(self) -> dict[int, NodeChannel]:
        """Take over the channels to the nodes that have ended, if there may be more to ask."""
        if not self.restarts.allowed or self.end.left:
            return {}
        given = {
            follower.node.index: follower.give_channel()
            for follower, node in zip(self.followers, self.nodes, strict=True)
            if node.over  # who was given up may keep its follower waiting for a connection
        }
        return {index: channel for index, channel in given.items() if channel is not None}

    def turn(self, keys: Keys) -> None:
        try:
            message = self.inbox.get(timeout=0.1)
        except queue.Empty:
            pass
        else:
            if isinstance(message, int):
                self.signalled(message)
            else:
                self.handle(message)
        pressed = keys.pressed()
        if "d" in pressed:
            self.leave()
        elif "h" in pressed or "?" in pressed:
            self.say(KEYS)
        self.check_successor()
        if self.end.order_is_due(time.monotonic()):
            self.end_all(self.end.order_why, PEER_GRACE)
        self.check_patience()
        self.check_progress()
        self.check_growth()
        if self.changed:
            self.changed = False
            self.save()

    def post(self, news: News) -> None:
        """Take news from a follower's thread. Growth needs no decision: the screen reads it."""
        if isinstance(news, news_of.Grew):
            self.display.grew()
        else:
            self.inbox.put(news)

    def handle(self, news: News) -> None:
        node = next(state for state in self.nodes if state.record.index == news.node)
        if isinstance(news, news_of.Happened):
            self.happened(node, news.event)
        elif isinstance(news, news_of.Lost):
            self.lost(node, news)
        elif isinstance(news, news_of.Connected):
            self.set_clock(node, news.clock)
            if node.lost_since:
                self.say(f"{node.who} is back after {node.away:.0f} s")
            node.lost_since = node.outside_since = node.awaited = 0.0
        elif isinstance(news, news_of.ClockRead):
            self.set_clock(node, news.clock)
        elif isinstance(news, news_of.Answer):
            self.answered(news)
        elif isinstance(news, news_of.OutputsStay):
            self.say(f"node {news.node}: {news.what}")
        elif isinstance(news, news_of.WroteBeside):
            self.beside[news.node] = news.what
        elif isinstance(news, news_of.DiskFull):
            self.disk_full()
        elif isinstance(news, news_of.Over):
            self.over(node, "its supervisor was killed")
        elif isinstance(news, news_of.Unknown):
            self.over(node, f"has no such job: {news.why}")
        elif isinstance(news, news_of.Failed):
            raise news.error

    # -- what nodes report -------------------------------------------------------------------

    def happened(self, node: NodeState, event: Event) -> None:
        when = event.time - node.clock
        node.note_time(event)
        if isinstance(event, events.RankSlow):
            self.slow(event)
        elif isinstance(event, events.RankEvent):
            node.take(event)
            if isinstance(event, events.RankAfresh):
                self.started_afresh(event)
            elif isinstance(event, events.RankFinished):
                self.rank_done(node, event.rank, when)
            elif isinstance(event, events.RankEnded):
                self.rank_ended(node, event, when)
        elif isinstance(event, events.Started):
            node.record = replace(node.record, state="running")
        elif isinstance(event, events.LeaseFormed):
            if not event.active:
                self.say(
                    f"{node.who} cannot reach node 0's supervisor ({event.why}): without a head,"
                    " an end on one will not be an end on the other. If that is a firewall, ranks"
                    f" that connect to each other hang, too: {OPEN_ALL}"
                )
        elif isinstance(event, events.Ending):
            node.grace, node.asked_at = event.grace, event.time
            if self.end.open:
                self.ending(node, event, when)
        elif isinstance(event, events.Ended):
            self.ended(node, event, when)
        self.changed = True

    def slow(self, event: events.RankSlow) -> None:
        """Note who holds the others up; the log says it. A new head hears it all once more."""
        self.held_up(
            SlowRank(
                cause=event.cause,
                rank=event.who,
                node=event.node,
                step=event.step,
                text=event.text,
            )
        )

    def held_up(self, found: SlowRank) -> None:
        if found not in self.record.slow:
            self.record = replace(self.record, slow=[*self.record.slow, found])
            self.straggler(self.record, found)
            if problem := incidents.note_slow(self.experiment.name, self.record, found):
                self.say(problem)

    def started_afresh(self, event: events.RankAfresh) -> None:
        """Say why ranks were not forked, once for all of them."""
        if event.why not in self.afresh:
            self.afresh.add(event.why)
            self.say(f"rank {event.rank} is started afresh, not forked: {event.why}")

    def ending(self, node: NodeState, event: events.Ending, when: float) -> None:
        """Handle an end that a supervisor began, and that this head did not order."""
        if event.headless:
            self.say(f"{node.who} ended its part: {event.why}")
        elif self.backend.has_other_heads:
            self.ended_elsewhere(node, event, when)
        elif event.lost is not None and 0 <= event.lost < len(self.nodes):
            lost, since = self.nodes[event.lost], when - event.silent
            if event.gone:
                self.failed(failure_of(lost, since, "supervisor", event.why))
            else:
                self.give_up_on(lost, event.why, since)

    def ended_elsewhere(self, node: NodeState, event: events.Ending, when: float) -> None:
        """Handle a failure on a node that another head follows (run-node)."""
        if event.failed or event.lost is not None:
            self.end.outcome = Outcome.FAILED if event.lost is None else Outcome.LOST
            self.display.mute()
            self.say(f"{event.why}; this node ends its part")
            self.failures.append(failure_of(node, when, "elsewhere", event.why))

    def ended(self, node: NodeState, event: events.Ended, when: float) -> None:
        node.ended = event
        self.say_what_was_lost(node, event)
        self.say_what_was_killed(node, event)
        if not self.end.open:
            return
        if event.swept:
            self.failed(failure_of(node, when, "supervisor", event.why))
        elif event.agent != 0 and not event.why:
            self.failed(verdict.of_torchrun(node.record.index, node.record.name, event, when))

    def say_what_was_lost(self, node: NodeState, event: events.Ended) -> None:
        """Say what its log ends without; what a disk refused earlier, the log says by itself."""
        if event.lost:
            self.say(
                f"{node.who}: the last {size(event.lost)} of output are in no log: there was no"
                " room for them on the disk of ~/.orchestrator there (`df -h ~`, `quota`)"
            )

    def say_what_was_killed(self, node: NodeState, event: events.Ended) -> None:
        """Say what did not end by itself: what it had not saved is lost."""
        if event.left_behind:
            self.say(f"{node.who}: ended what ranks had left running: {listed(event.left_behind)}")
        ranks = {rank.pid: f"rank {number}" for number, rank in event.ranks.items() if rank.pid}
        unsaved = {pid: ranks[pid] for pid in event.killed if pid in ranks}
        if unsaved and self.end.outcome in (Outcome.STOPPED, Outcome.RESIZED) and node.grace:
            who = ", ".join(unsaved.values())
            waited = min(node.grace, round(max(0.0, event.time - node.asked_at), 1))
            self.say(f"{node.who}: killed {who}: still there {waited:g} s after it was asked")

    def rank_done(self, node: NodeState, rank: int, when: float) -> None:
        # It closes its connections between its last line and its end: others may fail before that.
        why = "ended with exit code 0 while others waited for it"
        self.failures.append(failure_of(node, when, "ended_early", why, rank))

    def rank_ended(self, node: NodeState, event: events.RankEnded, when: float) -> None:
        if event.code == 0:
            self.rank_done(node, event.rank, when)
        elif not event.asked:
            message = node.ranks[event.rank].words or ""
            index, name = node.record.index, node.record.name
            self.failed(verdict.of_rank(index, name, event, when, message))

    def over(self, node: NodeState, otherwise: str) -> None:
        """Close a node; without a last event, `otherwise` is what happened to it."""
        node.close()
        self.changed = True
        if node.ended is None:
            self.failed(failure_of(node, time.time(), "supervisor", otherwise))
        elif node.ended.left:
            left = list(node.ended.left)
            self.say(
                f"node {node.record.index}: processes {left} do not end (stuck in the kernel?)"
            )

    def answered(self, news: news_of.Answer) -> None:
        if isinstance(news.answer, Stuck):
            self.hang_monitor.answer(news.node, news.answer)
        elif isinstance(news.answer, Paces):
            self.slow_monitor.answer(news.node, news.answer)
        elif isinstance(news.answer, Listening) or self.start_monitor.over:
            self.link_monitor.answer(news.node, news.answer)
        else:
            self.start_monitor.answer(news.node, news.answer)

    def set_clock(self, node: NodeState, offset: float) -> None:
        if abs(offset) > CLOCK_IS_OFF and abs(offset - node.clock) > CLOCK_IS_OFF:
            what = f"{abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
            self.say(f"the clock of node {node.record.index} is {what}; its times are corrected")
        node.clock = offset
        noted = offset if abs(offset) > CLOCK_IS_OFF else 0.0
        if abs(noted - node.record.clock) > CLOCK_IS_OFF:
            node.record = replace(node.record, clock=noted)
            self.changed = True

    def lost(self, node: NodeState, news: news_of.Lost) -> None:
        if not node.lost_since:
            node.lost_since, node.silent = time.monotonic(), news.silent
            self.say(f"{node.who}: {news.why}; trying to come back")
        node.lost_why = news.why
        if not news.outside:
            node.outside_since = 0.0
        elif not node.outside_since:
            node.outside_since = time.monotonic()
            self.say(
                f"{node.who}: {news.why}; it is lost if that is so for {CONTAINER_SECONDS:g} s"
            )

    # -- ending ------------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        if self.end.open:
            self.end.fail(f"{failure.who} failed", time.monotonic(), certain=failure.certain)
            self.display.mute()
            what = verdict.first_line(failure.message)
            what = f"it lost the others ({what[:100]})" if failure.echo else what
            self.say(f"{failure.who}: {what}; ending the job everywhere")

    def end_all(self, why: str, grace: float) -> None:
        self.end.ordered(grace, time.monotonic())
        for follower, node in zip(self.followers, self.nodes, strict=True):
            if not node.over:
                follower.end(why, grace)

    def signalled(self, number: int) -> None:
        if number == signal.SIGHUP or self.left_behind:
            self.end.left = True  # nobody who stops this machine means the job
            return
        self.interrupts += 1
        self.terminated = self.terminated or number == signal.SIGTERM
        if number == signal.SIGTERM and self.ranks_were_terminated():
            self.end.outcome = Outcome.STOPPED
            self.say("the same signal has reached this head: the job is stopped")
            self.end_all(verdict.STOPPED_BY_USER, self.grace)
            return
        self.out_of_time = number == signal.SIGUSR1 and self.end.open
        if self.out_of_time:
            self.say("the time limit of Slurm's job is near")
        if self.interrupts == 1 and (self.end.open or self.end.outcome is Outcome.RESIZED):
            self.end.outcome = Outcome.STOPPED
            self.say(f"asking all ranks to save and stop ({self.grace:g} s); Ctrl-C again to kill")
            self.end_all(verdict.STOPPED_BY_USER, self.grace)
        else:
            if self.end.open or self.restarts.allowed:  # else it would be started again
                self.end.outcome = Outcome.STOPPED
            self.say("killing all ranks")
            self.end_all(verdict.KILLED_BY_USER, 0.0)

    def ranks_were_terminated(self) -> bool:
        """Tell whether SIGTERM alone ended this job: scancel sends it to ranks and head, in any
        order."""
        causes = [f for f in self.failures if not f.echo and f.kind != "ended_early"]
        return (
            self.end.outcome is Outcome.FAILED
            and bool(causes)
            and all(failure.terminated for failure in causes)
        )

    def await_own_signal(self) -> None:
        """Wait a moment for the signal that ended the ranks, if it is meant for this head, too."""
        deadline = time.monotonic() + SAME_SIGNAL
        while self.ranks_were_terminated() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                message = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(message, int):
                    self.signalled(message)

    def check_patience(self) -> None:
        """Give up nodes that are lost, or that do not say that they have ended."""
        now = time.monotonic()
        if self.left_behind and self.is_cut_off():
            return
        for node in self.nodes:
            away, gone = node.away, node.outside > CONTAINER_SECONDS
            why = f"no connection for {away:.0f} s ({node.lost_why})"
            # A cause from when it was last heard of: before what its silence did to others.
            since = time.time() - away
            waits = self.record.launch.on_node_loss != "stop"
            late = away > max(self.node_loss_timeout, 2 * node.awaited)
            if (late or (gone and not waits)) and self.end.open:
                if not waits:
                    self.give_up_on(node, why, since)
                else:
                    node.awaited = away
                    self.say(f"{node.who}: {why}; still waiting (--on-node-loss wait)")
            too_long = not self.end.open and (gone or node.unheard > self.node_loss_timeout)
            given_up = self.end.gives_up(now) or too_long
            if given_up and not node.given_up and away and self.end.outcome is not Outcome.LOST:
                self.failures.append(failure_of(node, since, "lost", why))
            node.given_up = node.given_up or given_up

    def is_cut_off(self) -> bool:
        """Tell whether no node can be reached: it is this machine that is lost, not the job.

        A head that was left behind leaves in the end; `attach` finds what became of the job.
        """
        away = [node.away for node in self.nodes if not node.over]
        if not all(away) or not self.end.open:
            return False
        if min(away, default=0.0) > max(CUT_OFF_SECONDS, self.node_loss_timeout):
            self.say(f"no node was reached for {min(away):.0f} s")
            self.end.left = True
        return True

    def give_up_on(self, node: NodeState, why: str, when: float) -> None:
        self.end.outcome = Outcome.LOST
        self.failures.append(failure_of(node, when, "lost", why))
        self.say(f"{node.who}: {why}; ending the job everywhere")
        self.end_all(f"node {node.record.index} was lost", PEER_GRACE)

    def check_progress(self) -> None:
        if not self.end.open or self.left_hanging or any(node.lost_since for node in self.nodes):
            return
        followers = [f for f, n in zip(self.followers, self.nodes, strict=True) if not n.over]
        begun = any(node.ranks for node in self.nodes)
        unmet = self.start_monitor.look(followers, begun=begun)
        if unmet is not None:
            self.failed(unmet)
            return
        apart = self.link_monitor.look(followers, begun=begun)
        if apart:
            self.say(apart)
        slow = self.slow_monitor.look(followers)
        if slow is not None:
            self.held_up(slow.replace(time=time.time()))
            self.say(slow.text)
            self.changed = True
        failure = self.hang_monitor.look(followers)
        if failure is not None and self.record.launch.on_hang == "stop":
            self.failed(failure)
        elif failure is not None:
            self.left_hanging = True
            self.say(f"{failure.message}; left as it is (--on-hang leave)")

    def check_growth(self) -> None:
        """End this attempt in good order once the job can go on with more nodes."""
        quiet = self.end.open and not any(node.lost_since or node.over for node in self.nodes)
        larger = self.growth.look(self.record) if self.growth is not None and quiet else None
        if larger is None:
            return
        self.record = replace(self.record, spares=list(larger.spares))
        self.resized = larger.why
        self.experiment.sign(self.current_record())
        self.save()  # whoever follows the job then has to know who joins
        self.end.outcome = Outcome.RESIZED
        self.say(f"{larger.why}; asking all ranks to save and stop ({self.grace:g} s)")
        self.end_all(RESIZED, self.grace)

    def check_successor(self) -> None:
        if time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + SUCCESSOR_SECONDS
            self.successor = self.experiment.successor()
            self.end.left = self.end.left or self.successor is not None

    def leave(self) -> None:
        """Leave the job running, as the user wants: no node must take that for a lost head."""
        self.end.left = self.left_on_purpose = True
        if self.record.launch.on_head_loss == "stop":
            deadline = time.monotonic() + LEAVE_LIMIT
            for follower in self.followers:
                follower.leave()
            for follower in self.followers:
                follower.left.wait(max(0.0, deadline - time.monotonic()))

    # -- the record --------------------------------------------------------------------------

    def disk_full(self, error: OSError | None = None) -> None:
        if self.disk_is_full:
            return
        self.disk_is_full = True
        if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            self.say(f"{self.experiment.path} cannot be written: {error.strerror}")
        else:
            self.say(f"no space left for {self.experiment.path}: the logs wait on the nodes")

    def save(self) -> None:
        self.record = self.current_record()
        try:
            self.experiment.write_record(self.record)
            self.disk_is_full = False
        except OSError as error:
            self.changed = True  # again at the next turn
            self.disk_full(error)

    def current_record(self) -> JobRecord:
        nodes = [replace(n.record, ranks=n.ranks, times=n.times) for n in self.nodes]
        running = self.record.state == "starting" and all(n.state != "starting" for n in nodes)
        return replace(self.record, nodes=nodes, state="running" if running else self.record.state)

    @property
    def stopped_in_time(self) -> bool:
        """Tell whether the ranks saved and ended in order to go on later: Slurm wants the nodes."""
        return (self.out_of_time or self.taken_back) and self.record.state == "stopped"

    def conclude(self) -> None:
        unreached = [node for node in self.nodes if not node.over]
        for node in unreached:
            node.record = replace(node.record, state="lost")
        state, code = self.outcome(bool(unreached))
        codes = [rank.code for node in self.nodes for rank in node.ranks.values()]
        bad = sum(code not in (0, None) for code in codes)
        conclusion = None
        if state == "stopped":
            why = next((node.ended.why for node in self.nodes if node.ended and node.ended.why), "")
            of_scheduler = self.backend.why_terminated(self.record) if self.terminated else ""
            why = of_scheduler or why or verdict.STOPPED_BY_USER
            conclusion = verdict.stopped(why, time.time())
        elif state not in ("done", RESIZED):
            silent = [(node.record.index, node.record.name) for node in unreached]
            conclusion = verdict.conclude(verdict.of_silent(self.failures, silent), bad)
            if conclusion:
                fix = manifest.not_sent(self.experiment, conclusion.message)
                conclusion = replace(conclusion, fix=fix or conclusion.fix)
            if problem := incidents.note(self.experiment.name, self.record, conclusion):
                self.say(problem)
        self.record = replace(
            self.current_record(),
            state=state,
            exit_code=code,
            ended=time.time(),
            verdict=conclusion,
        )
        self.record = Restarts(self.record).after(
            self.experiment, stopped=bool(self.interrupts), resized=self.resized
        )
        now = self.record.ended or time.time()
        known = goodput.of(self.record, self.experiment.path, now)
        self.record = replace(self.record, goodput=known)
        if self.terminated and state == "stopped":
            self.taken_back = self.backend.is_taken_back(self.record)
        # What can be queued again has not ended: whoever reads the record would leave it.
        if not self.stopped_in_time:
            self.save()

    def outcome(self, unreached: bool) -> tuple[str, int]:
        if self.end.outcome is Outcome.STOPPED and not unreached:
            return "stopped", EXIT_STOPPED
        if self.end.outcome is Outcome.LOST or unreached:
            return "lost", EXIT_NODE
        if self.end.outcome is Outcome.FAILED:
            return "failed", EXIT_FAILED
        reasons = {node.ended.why for node in self.nodes if node.ended and node.ended.why}
        # A rank that lost those that were asked to end before it has failed, and is no cause.
        broke = any(failure.kind != "ended_early" for failure in self.failures)
        broke = broke and self.end.outcome is Outcome.RESIZED
        if self.restarts.allowed and RESIZED in reasons and (broke or len(reasons) == 1):
            return RESIZED, EXIT_STOPPED
        if broke:
            return "failed", EXIT_FAILED
        if reasons:
            # Ended by somebody else: `orchestrator stop`, or a signal to a supervisor.
            return "stopped", EXIT_STOPPED
        return "done", EXIT_DONE

    def say(self, text: str) -> None:
        self.display.say(f"orchestrator: {text}")


def failure_of(
    node: NodeState, when: float, kind: str, message: str, rank: int | None = None
) -> Failure:
    return Failure(node.record.index, node.record.name, rank, when, kind, message)


def listed(processes: dict[int, str]) -> str:
    return ", ".join(f"{name} (process {pid})" for pid, name in processes.items())
