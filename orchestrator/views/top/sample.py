"""Looks at all nodes at once, again and again, over connections that stay open."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import serving
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes import clock
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.facts import Checkup, Gpu, Load
from orchestrator.protocol.requests.machine import Examine
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, NodeRecord
from orchestrator.records.metrics import progress
from orchestrator.records.metrics.progress import Progress, RankProgress

EVERY = "*"
AGAIN_SECONDS = 5.0  # until a job whose experiment is not here is looked for once more
ANSWER_SECONDS = 20.0
RETRY_SECONDS = 5.0  # a node that is lost is tried again so often
STALE_SECONDS = 5.0  # an answer that is older is not shown as if it were of now
GPU_SECONDS = 5.0  # between two questions for the GPUs: nvidia-smi costs a node more than the rest


@dataclass(frozen=True, kw_only=True)
class JobSample(Progress):
    """One job that runs on some of the nodes, and how far it is where its experiment is here."""

    job: str
    user: str
    nodes: tuple[str, ...]
    since: float
    experiment: str = ""
    ranks: tuple[RankProgress, ...] = ()  # of the job that is looked at closer


@dataclass(frozen=True)
class NodeSample:
    """One node at one moment; where `problem` says why it could not be asked, nothing else."""

    name: str
    checkup: Checkup | None = None
    received: float | None = None  # bytes per second since the last look
    sent: float | None = None
    problem: str = ""
    fix: str = ""  # of the problem

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.checkup.gpus or () if self.checkup is not None else ()

    @property
    def load(self) -> Load | None:
        return self.checkup.load if self.checkup is not None else None


@dataclass(frozen=True)
class TopSample:
    time: float
    nodes: tuple[NodeSample, ...]
    jobs: tuple[JobSample, ...]


@dataclass
class Watch:
    """Keeps a channel to every node, and finds the experiments of the jobs that run there."""

    transport: Transport
    nodes: Sequence[Node | NodeRecord]
    experiments: Path
    trusted: bool = False
    closer: str = ""  # the job whose ranks are looked at; or EVERY
    patience: float | None = None  # seconds after which a look goes without those who are late
    known: dict[str, Experiment] = field(default_factory=dict)  # of the jobs that run
    sought_at: float = float("-inf")

    def __post_init__(self) -> None:
        fleet.need_room_for(self.nodes)
        self.watched = [WatchedNode(node, self.transport) for node in self.nodes]

    def observe(self) -> TopSample:
        """Ask all nodes at once; one that is late is in a later look."""
        deadline = None if self.patience is None else time.monotonic() + self.patience
        for each in self.watched:
            each.begin()
        for each in self.watched:
            each.done.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if each.crash is not None:
                raise each.crash
        return self.seen()

    def seen(self) -> TopSample:
        """Return what is known now, of nodes that were never asked as well."""
        nodes = tuple(each.newest() for each in self.watched)
        return TopSample(time.time(), nodes, tuple(self.jobs(nodes)))

    def close(self) -> None:
        for each in self.watched:
            each.close()

    def jobs(self, nodes: Sequence[NodeSample]) -> list[JobSample]:
        """Put together what the nodes say of each job with what its experiment here says.

        Those that were started from here stand first, the oldest first of all: a place on the
        screen stays the same job's as long as it can.
        """
        found: dict[str, JobSample] = {}
        for node in nodes:
            for user in node.load.users if node.load is not None else ():
                if user.job:
                    before = found.get(user.job)
                    places = (*(before.nodes if before else ()), node.name)
                    since = min(user.since, before.since) if before else user.since
                    found[user.job] = JobSample(
                        job=user.job, user=user.user, nodes=places, since=since
                    )
        self.known = {job: each for job, each in self.known.items() if job in found}
        if found.keys() - self.known.keys() and time.monotonic() > self.sought_at + AGAIN_SECONDS:
            self.sought_at = time.monotonic()
            self.find(found)
        samples = [self.placed(sample) for sample in found.values()]
        return sorted(samples, key=lambda sample: (not sample.experiment, sample.since))

    def find(self, jobs: dict[str, JobSample]) -> None:
        for each in experiments.every(self.experiments, trusted=self.trusted):
            with contextlib.suppress(OrchestratorError):
                if (job := each.read_record().job) in jobs:
                    self.known[job] = each

    def placed(self, sample: JobSample) -> JobSample:
        """Add how far a job is, as far as its metrics tell it, and its ranks if it is closer."""
        with contextlib.suppress(KeyError, OSError, OrchestratorError):  # it may be removed now
            found = self.known[sample.job]
            record = found.read_record()
            steps = progress.all_steps(found.path, record)
            how_far, ranks = progress.of(found.path, record, steps)
            closer = tuple(ranks) if self.closer in (sample.job, EVERY) else ()
            return replace(sample, experiment=found.name, ranks=closer, **vars(how_far))
        return sample


@dataclass
class WatchedNode:
    """A node, the channel to it while there is one, and what it said last."""

    node: Node | NodeRecord
    transport: Transport
    channel: NodeChannel | None = None
    again_at: float = 0.0
    before: Load | None = None
    last: NodeSample | None = None  # of the last look that is over
    since: float = 0.0  # monotonic: when that was, or the first look began
    gpus: Checkup = field(default_factory=Checkup)  # what it said of its GPUs
    gpus_at: float = float("-inf")  # monotonic
    crash: BaseException | None = None  # a defect of ours
    closed: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.done.set()

    def begin(self) -> None:
        """Look in a thread, unless one still does."""
        if self.done.is_set():
            self.done.clear()
            self.since = self.since or time.monotonic()
            fleet.start(self.look)

    def look(self) -> None:
        try:
            self.last = self.observe()
        except BaseException as error:  # noqa: BLE001  a defect of ours: raised by the watch
            self.crash = error
        self.since = time.monotonic()
        if self.closed:
            self.drop()
        self.done.set()

    def newest(self) -> NodeSample:
        """Return what the node said last, while that is as good as new."""
        silent = time.monotonic() - self.since
        if self.last is not None and (self.done.is_set() or silent < STALE_SECONDS):
            return self.last
        if self.channel is None:
            problem = self.last.problem if self.last is not None else ""
            return NodeSample(self.node.name, problem=problem or "connecting ...")
        return NodeSample(self.node.name, problem=f"it has not answered for {silent:.0f} s")

    def observe(self) -> NodeSample:
        if self.channel is None and self.last is not None and time.monotonic() < self.again_at:
            return self.last
        try:
            if self.channel is None:
                self.again_at = time.monotonic() + RETRY_SECONDS
                self.channel = serving(self.transport, self.node)
            checkup = self.ask(self.channel)
        except OrchestratorError as error:
            self.drop()
            return NodeSample(self.node.name, problem=error.what, fix=error.fix)
        rates = rates_between(self.before, checkup.load)
        self.before = checkup.load
        return NodeSample(self.node.name, checkup, *rates)

    def ask(self, channel: NodeChannel) -> Checkup:
        """Ask a node for its load; for its GPUs now and then."""
        parts: tuple[str, ...] = ("load",)
        if time.monotonic() - self.gpus_at > GPU_SECONDS:
            parts = ("gpus", "load")
        checkup = clock.checkup_now(channel.ask(Examine(workdir="/", parts=parts), ANSWER_SECONDS))
        if len(parts) == 1:
            return self.gpus.replace(load=checkup.load)
        self.gpus, self.gpus_at = checkup, time.monotonic()
        return checkup

    def drop(self) -> None:
        channel, self.channel, self.before = self.channel, None, None  # another thread may do it
        self.gpus_at = float("-inf")
        if channel is not None:
            channel.connection.close()

    def close(self) -> None:
        """Hang up; a thread that is connecting does so when it is connected."""
        self.closed = True
        self.drop()


def rates_between(before: Load | None, now: Load | None) -> tuple[float | None, float | None]:
    """Return the bytes per second that came and went between two looks."""
    if before is None or now is None or now.at <= before.at:
        return None, None
    seconds = now.at - before.at
    received, sent = now.received - before.received, now.sent - before.sent
    return (max(0, received) / seconds, max(0, sent) / seconds)
