"""Looks now and then for nodes with which a job that runs on fewer than it may could go on.

A thread of its own asks: a node that is away takes as long as a connection may. It goes over the
connections that are held, and looks less and less often while nothing changes. What it finds, the
head that follows the job takes up, which alone ends the attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from orchestrator.common.errors import OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.common.text import Say, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached, kept_if_well, serving
from orchestrator.head.connect.transport import Transport
from orchestrator.head.doctor.examination import CHECKS
from orchestrator.head.doctor.findings import BAD, Case, Examined, Needs
from orchestrator.head.follow.job_end import Change
from orchestrator.head.follow.restarts import REST_SECONDS, Restarts
from orchestrator.head.nodes.facts import Facts
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.start.recovery.candidates import Candidate, choose
from orchestrator.protocol.requests.machine import Probe, ProbeTarget
from orchestrator.protocol.requests.start import AskKept, GetReady
from orchestrator.records.experiment import RESIZED, JobRecord, NodeRecord

log = logging.getLogger(__name__)

CHECKED = ("torch", "gpus", "disk", "shm", "limits")  # of a node that is to join: as at a launch
SETTLED_SECONDS = 60.0  # after which a job that has kept nothing is not expected to
CHECKPOINT_SECONDS = 2.0  # between two questions whether something new was kept
LONGEST_PAUSE = 10  # between two looks that found nothing, in times of the first one
UNWANTED_SECONDS = 10.0  # after which a head that does not look any more wants nothing


@dataclass(frozen=True)
class Asked:
    """A node that has answered."""

    channel: NodeChannel
    facts: Facts


class Latecomers(Protocol):
    """The nodes that had no part in the start of the job, and could be given one."""

    def absent(self, record: JobRecord) -> Sequence[Node]: ...

    def reach(self, node: Node) -> tuple[NodeRecord, Reached]: ...

    def stand_by(self, reached: Reached, say: Say) -> NodeRecord: ...


class Growth:
    """One per attempt, for a head that follows it; the one that launched it has latecomers."""

    def __init__(
        self,
        record: JobRecord,
        transport: Transport,
        say: Say,
        latecomers: Latecomers | None = None,
    ) -> None:
        self.transport, self.say, self.latecomers = transport, say, latecomers
        self.every = record.launch.grow_every
        self.began = time.monotonic()
        self.next_look = self.began + self.every
        self.fruitless = 0  # that have found nothing, one after the other
        self.thread: threading.Thread | None = None
        self.larger: Change | None = None
        self.kept_before: float | None = None  # when nodes could join first: wait for what is newer
        self.said: set[str] = set()
        self.asked_at = self.began
        self.unable: dict[str, float] = {}  # who could not be given a part, and until when it rests

    def check(self, record: JobRecord) -> Change | None:
        """Return the larger job once there is one. It never waits; ask it again and again."""
        self.asked_at = time.monotonic()
        if self.thread is not None and self.thread.is_alive():
            return None
        if self.larger is None and time.monotonic() >= self.next_look:
            self.thread = threading.Thread(target=self.search, args=(record,), daemon=True)
            self.thread.start()
            return None
        return self.larger

    def search(self, record: JobRecord) -> None:
        """Look once, and set the time of the next look."""
        log.debug("looks for nodes that can join, after %d looks in vain", self.fruitless)
        self.next_look = float("inf")
        pause = pause_after(self.every, self.fruitless + 1)
        try:
            if self.search_once(record):
                pause, self.fruitless = 0.0, -1
        except OrchestratorError as error:  # node 0 cannot be asked: who follows it notices, too
            self.once(f"no node can join now: {error}")
        except Exception as error:  # noqa: BLE001  a defect of ours must not end a training
            self.once(f"no further node is looked for: {error!r}")
            pause = float("inf")
        finally:
            self.fruitless += 1
            self.next_look = time.monotonic() + pause

    def search_once(self, record: JobRecord) -> bool:
        """Tell whether to look again at once: all was there but a new checkpoint."""
        restarts = Restarts(record)
        free = [node for node in record.spares if not restarts.refusal(node)]
        answers = fleet.everywhere(free, self.ask) if free else []
        there = {
            node.name: (node, answer)
            for node, answer in zip(free, answers, strict=True)
            if isinstance(answer, Asked)
        }
        late = self.reach_late(record)
        for name, (node, reached) in late.items():
            there[name] = node, Asked(reached.channel, reached.facts)
        if not there:
            return False
        open_now = [answer for _, answer in there.values()]
        try:
            master = self.ask(record.nodes[0])
            open_now.append(master)
            problems = {
                name: unfit(node, answer.facts, master.facts)
                for name, (node, answer) in there.items()
                if time.monotonic() >= self.unable.get(name, 0.0)
            }
            for name in filter(problems.get, problems):
                self.once(f"{name} cannot join: {problems[name]}")
            names = [name for name in there if name in chosen(record, problems)]
            if not names:
                self.kept_before = None
                return False
            kept = self.kept(master, record)
            if not kept:
                self.say_nothing_kept(names)
                return False
            self.kept_before = kept if self.kept_before is None else self.kept_before
            if kept <= self.kept_before:
                for _, answer in there.values():
                    answer.channel.connection.close()
                self.await_newer(master, record, self.kept_before)
                return True
            new = self.give_parts([late[name][1] for name in names if name in late])
            record = replace(record, spares=[*record.spares, *new])
            names = [name for name in names if name not in self.unable]
            if not names:
                return False
            self.get_ready(record, {name: there[name][1] for name in names})
            self.larger = larger(record, names)
            return False
        finally:
            for answer in open_now:
                answer.channel.connection.close()

    def reach_late(self, record: JobRecord) -> dict[str, tuple[NodeRecord, Reached]]:
        """Reach those that had no part in the start, and plan what each would run."""
        if self.latecomers is None:
            return {}
        try:
            absent = self.latecomers.absent(record)
        except OrchestratorError as error:
            self.once(f"nodes that had no part in the start cannot join: {error.what}")
            return {}
        nodes = [node for node in absent if not Restarts(record).refusal(node)]
        answers = fleet.everywhere(nodes, self.latecomers.reach) if nodes else []
        return {
            node.name: answer
            for node, answer in zip(nodes, answers, strict=True)
            if not isinstance(answer, OrchestratorError)
        }

    def give_parts(self, come: Sequence[Reached]) -> list[NodeRecord]:
        """Give those their part that had none at the start; one that cannot have it rests."""
        parts = []
        for reached in come:
            assert self.latecomers is not None
            name = reached.node.name
            self.unable.pop(name, None)
            try:
                parts.append(self.latecomers.stand_by(reached, self.say))
            except OrchestratorError as error:
                self.unable[name] = time.monotonic() + REST_SECONDS
                self.once(f"{name} cannot join: {error.what}")
        return parts

    def get_ready(self, record: JobRecord, joining: Mapping[str, Asked]) -> None:
        """Have processes wait there for the next attempt."""
        for node in record.spares:
            if node.name in joining:
                job, part = record.first_part(node)
                request = GetReady(job=job, node=part)
                joining[node.name].channel.ask(request, self.transport.timeout)

    def kept(self, master: Asked, record: JobRecord) -> float:
        """Return when node 0 kept something last, by its own clock."""
        request = AskKept(job=record.job, node=0)
        return master.channel.ask(request, self.transport.timeout).at

    def await_newer(self, master: Asked, record: JobRecord, before: float) -> None:
        """Ask node 0 alone, and over one connection: it may take hours. Then all are asked anew."""
        until = time.monotonic() + self.every * LONGEST_PAUSE
        while time.monotonic() < min(until, self.asked_at + UNWANTED_SECONDS):
            time.sleep(CHECKPOINT_SECONDS)
            if self.kept(master, record) > before:
                return

    def ask(self, node: NodeRecord) -> Asked:
        """Reach a node, and ask what it is."""
        channel = serving(self.transport, node)
        target = ProbeTarget(kind="program", name="sh")
        probe = Probe(cwd="/", workdir=None, peers=(), target=target)
        with kept_if_well(channel):
            return Asked(channel, Facts(**vars(channel.ask(probe, self.transport.timeout))))

    def say_nothing_kept(self, names: Sequence[str]) -> None:
        if time.monotonic() - self.began > max(SETTLED_SECONDS, self.every):
            self.once(
                f"{listed(names)} could join, but this job has kept nothing that more nodes"
                " could go on from (a checkpoint of the engine or the Trainer, or a state in"
                " $ORCHESTRATOR_RESUME_DIR): it goes on as it is"
            )

    def once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.say(f"orchestrator: {text}")


def pause_after(every: float, fruitless: int) -> float:
    """Return the seconds to the next look, after so many that have found nothing new."""
    return every * min(LONGEST_PAUSE, 2.0 ** max(0, fruitless - 1))


def chosen(record: JobRecord, problems: Mapping[str, str]) -> set[str]:
    """Name the nodes that the job would have if it were started again now."""
    restarts = Restarts(record)
    running = [Candidate(node.name, place) for place, node in enumerate(record.nodes)]
    free = [
        Candidate(name, problem=problem, failures=restarts.blamed(name))
        for name, problem in problems.items()
    ]
    return set(choose([*running, *free], len(record.nodes), restarts.bounds[1]).nodes)


def larger(record: JobRecord, names: Sequence[str]) -> Change:
    """Let these nodes stand by: the next attempt takes them."""
    log.info("can join: %s", names)
    spares = [
        replace(node, state="standing by") if node.name in names else node for node in record.spares
    ]
    count = len(record.nodes)
    reason = f"{listed(names)} can join: on with {count + len(names)} nodes instead of {count}"
    return Change(RESIZED, reason, spares)


def unfit(node: NodeRecord, facts: Facts, master: Facts) -> str:
    """Say what the quick check of a launch would refuse, beside a node that the job runs on."""
    if facts.gpus < min(node.nproc, master.gpus):
        return f"it has {plural(facts.gpus, 'GPU')} for {plural(node.nproc, 'rank')}"
    others = Examined("the others", facts=master)
    case = Case((others, others, Examined(node.name, facts=facts)), full=False,
                needs=Needs(torch=bool(master.torch)))  # fmt: skip
    findings = [finding for check in CHECKED for finding in CHECKS[check](case)]
    bad = [each.what for each in findings if each.level == BAD and node.name in each.nodes]
    return bad[0].removeprefix(f"{node.name}: ") if bad else ""
