"""A job while it runs: what its nodes report, what the user wants, and how it ends.

Used by launch and attach alike. One thread; followers and signals talk to it through a queue.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator import interrupt
from orchestrator.errors import EXIT_DONE, EXIT_FAILED, EXIT_NODE, EXIT_STOPPED
from orchestrator.head.follow import verdict
from orchestrator.head.follow.follower import Follower, Message
from orchestrator.head.follow.hang_monitor import Watch
from orchestrator.head.follow.verdict import Failure
from orchestrator.head.screen.display import Display
from orchestrator.head.screen.keyboard import Keys
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

HEARSAY = 0.3  # what fails by itself in this time says so, before it is ended for another
PEER_GRACE = 0.5  # after a failure elsewhere nothing can go on: time enough to print why
END_LIMIT = 30.0  # beyond its grace, a node that was told to end has this long to say it did
THIEF_SECONDS = 0.5  # between two looks whether another head wants to take over
LEAVE_LIMIT = 3.0
CLOCK_IS_OFF = 2.0  # seconds: worth a word, because the log's own times will mislead
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class NodeState:
    """What is known of one node's part now."""

    record: NodeRecord
    over: bool = False
    ended: dict[str, Any] | None = None  # the supervisor's last event
    lost_since: float = 0.0
    lost_why: str = ""
    given_up: bool = False
    awaited: float = 0.0  # seconds without it that were said already
    clock: float = 0.0  # the node's clock minus ours
    ranks: dict[str, dict[str, Any]] = field(default_factory=dict)


class Run:
    """`go()` returns when the job is over or left alone; `record` then says how it stands."""

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        display: Display,
        *,
        grace: float,
        node_loss_timeout: float,
    ) -> None:
        self.experiment = experiment
        self.record = record
        self.display = display
        self.grace = grace
        self.node_loss_timeout = node_loss_timeout
        self.nodes = [NodeState(node) for node in record.nodes]
        self.followers: Sequence[Follower] = ()
        self.watch = Watch(record.hang_timeout, experiment, record.job, self.say)
        self.left_hanging = False
        self.to_end: tuple[float, str] | None = None  # when, and why
        self.inbox: queue.SimpleQueue[Message | int] = queue.SimpleQueue()
        self.failures: list[Failure] = []
        self.ending = ""  # "", failed, stopped, lost
        self.interrupts = 0
        self.out_of_time = False  # the reason of a stop: Slurm may start the job again
        self.give_up_at = float("inf")
        self.detached = False
        self.since = time.time()
        self.thief: dict[str, Any] | None = None
        self.next_look = 0.0
        self.changed = True
        self.disk_is_full = False

    # -- the loop ----------------------------------------------------------------------------

    def go(self, followers: Sequence[Follower], typed: Keys | None = None) -> None:
        self.followers = followers
        # Slurm tells a batch script by SIGUSR1 that its time is nearly over.
        signals = (*SIGNALS, signal.SIGUSR1) if self.record.batch else SIGNALS
        before = {number: signal.getsignal(number) for number in signals}
        for number in signals:
            signal.signal(number, lambda signum, _: self.inbox.put(signum))
        for held in interrupt.release():
            self.inbox.put(held)
        try:
            with typed or Keys() as keys:
                for follower in followers:
                    follower.start()
                while not self.detached and not all(n.over or n.given_up for n in self.nodes):
                    self.turn(keys)
        finally:
            interrupt.hold()  # the job is over: only its record is still to be written
            for number, handler in before.items():
                signal.signal(number, handler)
        for follower in followers:
            follower.close()
        if not self.detached:
            self.conclude()

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
        if "d" in keys.pressed():
            self.leave()
        self.check_thief()
        self.end_when_all_had_their_say()
        self.check_patience()
        self.check_progress()
        if self.changed:
            self.changed = False
            self.save()

    def post(self, message: Message) -> None:
        """For the followers' threads. Growth needs no decision: it goes straight to the screen."""
        if message.kind == "grew":
            self.display.grew()
        else:
            self.inbox.put(message)

    def handle(self, message: Message) -> None:
        node = next(one for one in self.nodes if one.record.index == message.node)
        if message.kind == "event":
            self.event(node, message.data)
        elif message.kind == "lost":
            self.lost(node, message.data["why"])
        elif message.kind == "back":
            self.set_clock(node, message.data["clock"])
            if node.lost_since:
                away = time.monotonic() - node.lost_since
                self.say(
                    f"node {node.record.index} ({node.record.name}) is back after {away:.0f} s"
                )
            node.lost_since = node.awaited = 0.0
        elif message.kind == "clock":
            self.set_clock(node, message.data["clock"])
        elif message.kind == "crashed":
            raise message.data["error"]
        elif message.kind == "stuck":
            self.watch.answer(message.node, message.data)
        elif message.kind == "stays":
            self.say(f"node {node.record.index}: {message.data['what']}")
        elif message.kind == "disk_full":
            self.disk_full()
        elif message.kind == "refused":
            self.over(node, f"has no such job: {message.data['why']}")
        elif message.kind == "over":
            self.over(node, "its supervisor was killed")

    def event(self, node: NodeState, event: dict[str, Any]) -> None:
        kind = event["event"]
        when = event["time"] - node.clock
        index, name = node.record.index, node.record.name
        if kind.startswith("rank_"):
            known = node.ranks.setdefault(str(event["rank"]), {})
            known.update({k: event[k] for k in ("pid", "code", "peak_kb") if k in event})
            known["state"] = kind[5:]
            if kind == "rank_exit":
                known["words"] = event["code"]
            if kind == "rank_afresh":
                self.say(f"rank {event['rank']}: started afresh, not forked: {event['why']}")
            if kind in ("rank_finished", "rank_ended"):
                self.rank_ended(node, event, when)
        elif kind == "started":
            node.record = replace(node.record, state="running")
        elif kind == "lease" and not event["active"]:
            self.say(
                f"node {index} ({name}) cannot reach node 0's supervisor ({event['why']}): without"
                " a head, an end on one will not be an end on the other"
            )
        elif kind == "ending" and event.get("headless") and not self.ending:
            self.say(f"node {index} ({name}) ended its part: {event['why']}")
        elif kind == "ending" and self.record.part_of and not self.ending:
            self.ended_elsewhere(index, name, event, when)
        elif kind == "ending" and "lost" in event and not self.ending:
            self.give_up_on(self.nodes[event["lost"]], event["why"], when - event["silent"])
        elif kind == "ended":
            node.ended = event
            if event.get("swept") and not self.ending:
                self.failed(Failure(index, name, None, when, "supervisor", event["why"]))
            elif event["agent"] != 0 and not event["why"] and not self.ending:
                self.failed(verdict.of_torchrun(index, name, event, when))
        self.changed = True

    def ended_elsewhere(self, index: int, name: str, event: dict[str, Any], when: float) -> None:
        """Of a job whose other nodes have heads of their own: it failed, or was lost, there."""
        if event.get("failed") or "lost" in event:
            self.ending = "lost" if "lost" in event else "failed"
            self.display.mute()
            self.say(f"{event['why']}; this node ends its part")
            self.failures.append(Failure(index, name, None, when, "elsewhere", event["why"]))

    def rank_ended(self, node: NodeState, event: dict[str, Any], when: float) -> None:
        index, name, rank = node.record.index, node.record.name, int(event["rank"])
        # It closes its connections between its last line and its end: others may fail before that.
        if event.get("code", 0) == 0:
            words = "ended with exit code 0 while others waited for it"
            self.failures.append(Failure(index, name, rank, when, "ended_early", words))
        elif not event["asked"]:
            event = {**event, "words": node.ranks[str(rank)].get("words", "")}
            self.failed(verdict.of_rank(index, name, event, when))

    def over(self, node: NodeState, otherwise: str) -> None:
        node.over, node.lost_since = True, 0.0
        ended = node.ended
        code = ended["agent"] if ended else None
        node.record = replace(node.record, state="ended", exit_code=code, ranks=node.ranks)
        self.changed = True
        if ended is None:
            index, name = node.record.index, node.record.name
            self.failed(Failure(index, name, None, time.time(), "supervisor", otherwise))
        elif ended["left"]:
            self.say(f"node {node.record.index}: processes {ended['left']} do not die (kernel?)")

    def set_clock(self, node: NodeState, offset: float) -> None:
        if abs(offset) > CLOCK_IS_OFF and abs(offset - node.clock) > CLOCK_IS_OFF:
            what = f"{abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
            self.say(f"the clock of node {node.record.index} is {what}; its times are corrected")
        node.clock = offset

    def lost(self, node: NodeState, why: str) -> None:
        if not node.lost_since:
            node.lost_since = time.monotonic()
            self.say(f"node {node.record.index} ({node.record.name}): {why}; trying to come back")
        node.lost_why = why

    # -- ending ------------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        if not self.ending:
            self.ending = "failed"
            self.display.mute()
            what = verdict.first_line(failure.message)
            what = f"it lost the others ({what[:100]})" if failure.echo else what
            self.say(f"{failure.who}: {what}; ending the job everywhere")
            self.to_end = (time.monotonic() + HEARSAY, f"{failure.who} failed")

    def end_when_all_had_their_say(self) -> None:
        if self.to_end is not None and time.monotonic() >= self.to_end[0]:
            _, why = self.to_end
            self.end_all(why, PEER_GRACE)

    def end_all(self, why: str, grace: float) -> None:
        self.to_end = None
        self.give_up_at = time.monotonic() + grace + END_LIMIT
        for follower, node in zip(self.followers, self.nodes, strict=True):
            if not node.over:
                follower.end(why, grace)

    def signalled(self, number: int) -> None:
        if number == signal.SIGHUP:
            self.detach()
            return
        self.interrupts += 1
        self.out_of_time = number == signal.SIGUSR1 and not self.ending
        if self.out_of_time:
            self.say("the time limit of Slurm's job is near")
        if self.interrupts == 1 and not self.ending:
            self.ending = "stopped"
            self.say(f"asking all ranks to save and stop ({self.grace:g} s); Ctrl-C again to kill")
            self.end_all("stopped by the user", self.grace)
        else:
            self.ending = self.ending or "stopped"
            self.say("killing all ranks")
            self.end_all("killed by the user", 0.0)

    def check_patience(self) -> None:
        now = time.monotonic()
        for node in self.nodes:
            away = now - node.lost_since if node.lost_since else 0.0
            index, name = node.record.index, node.record.name
            words = f"no connection for {away:.0f} s ({node.lost_why})"
            # A cause from when it was last heard of: before what its silence did to others.
            gone = Failure(index, name, None, time.time() - away, "lost", words)
            if away > max(self.node_loss_timeout, 2 * node.awaited) and not self.ending:
                if self.record.on_node_loss == "stop":
                    self.give_up_on(node, words, gone.time)
                else:
                    node.awaited = away
                    self.say(f"node {index} ({name}): {words}; still waiting (--on-node-loss wait)")
            given = now > self.give_up_at or (self.ending and away > self.node_loss_timeout)
            if given and not node.given_up and away and self.ending != "lost":
                self.failures.append(gone)
            node.given_up = node.given_up or bool(given)

    def give_up_on(self, node: NodeState, words: str, when: float) -> None:
        index, name = node.record.index, node.record.name
        self.ending = "lost"
        self.failures.append(Failure(index, name, None, when, "lost", words))
        self.say(f"node {index} ({name}): {words}; ending the job everywhere")
        self.end_all(f"node {index} was lost", PEER_GRACE)

    def check_progress(self) -> None:
        if self.ending or self.left_hanging or any(node.lost_since for node in self.nodes):
            return
        failure = self.watch.look(
            [f for f, n in zip(self.followers, self.nodes, strict=True) if not n.over]
        )
        if failure is not None and self.record.on_hang == "stop":
            self.failed(failure)
        elif failure is not None:
            self.left_hanging = True
            self.say(f"{failure.message}; left as it is (--on-hang leave)")

    def check_thief(self) -> None:
        if time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + THIEF_SECONDS
            self.thief = self.experiment.thief()
            if self.thief is not None:
                self.detach()

    def detach(self) -> None:
        self.detached = True

    def leave(self) -> None:
        """The user leaves it running: no node is to take that for the loss of its head."""
        self.detach()
        if self.record.on_head_loss == "stop":
            deadline = time.monotonic() + LEAVE_LIMIT
            for follower in self.followers:
                follower.leave()
            for follower in self.followers:
                follower.left.wait(max(0.0, deadline - time.monotonic()))

    # -- the record --------------------------------------------------------------------------

    def disk_full(self) -> None:
        if not self.disk_is_full:
            self.disk_is_full = True
            self.say(f"no space left for {self.experiment.path}: the logs wait on the nodes")

    def save(self) -> None:
        nodes = [replace(node.record, ranks=node.ranks) for node in self.nodes]
        running = self.record.state == "starting" and all(n.state != "starting" for n in nodes)
        state = "running" if running else self.record.state
        self.record = replace(self.record, nodes=nodes, state=state)
        try:
            self.experiment.write_record(self.record)
            self.disk_is_full = False
        except OSError:
            self.changed = True  # again at the next turn
            self.disk_full()

    def conclude(self) -> None:
        unreached = [node for node in self.nodes if not node.over]
        for node in unreached:
            node.record = replace(node.record, state="lost")
        state, code = self.outcome(bool(unreached))
        codes = [rank.get("code") for node in self.nodes for rank in node.ranks.values()]
        bad = sum(code not in (0, None) for code in codes)
        told = verdict.conclude(self.failures, bad) if state not in ("stopped", "done") else None
        if state == "stopped":
            whys = [node.ended["why"] for node in self.nodes if node.ended and node.ended["why"]]
            told = verdict.stopped(whys[0] if whys else "stopped by the user", time.time())
        self.record = replace(
            self.record, state=state, exit_code=code, ended=time.time(), verdict=told
        )
        self.save()

    def outcome(self, unreached: bool) -> tuple[str, int]:
        if self.ending == "stopped" and not unreached:
            return "stopped", EXIT_STOPPED
        if self.ending == "lost" or unreached:
            return "lost", EXIT_NODE
        if self.ending == "failed":
            return "failed", EXIT_FAILED
        if any(node.ended and node.ended["why"] for node in self.nodes):
            # Ended by somebody else: `orchestrator stop`, or a signal to a supervisor.
            return "stopped", EXIT_STOPPED
        return "done", EXIT_DONE

    def say(self, text: str) -> None:
        self.display.say(f"orchestrator: {text}")
