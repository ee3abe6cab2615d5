"""Polls all nodes concurrently, over connections that stay open."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator.common.errors import OrchestratorError
from orchestrator.config.launch import Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.connect.reach import open_serving_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen.progress import stall_notice
from orchestrator.head.status.row import command_of
from orchestrator.protocol.facts import Checkup, Gpu, Load
from orchestrator.protocol.requests.claims import ClaimEntry
from orchestrator.protocol.requests.machine import Examine
from orchestrator.protocol.requests.start import ReadLockTable
from orchestrator.protocol.timing import ANSWER_SECONDS
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, NodeRecord
from orchestrator.records.metrics import progress
from orchestrator.records.metrics.progress import Progress, RankProgress

EVERY = "*"
# The least time between two searches for the experiments of jobs that are not known here.
AGAIN_SECONDS = 5.0
# A lost node is connected to again after this time.
PAUSE_SECONDS = 5.0
# A pending request hides the previous answer once it takes longer than this.
STALE_SECONDS = 5.0
# GPUs are queried less often, as nvidia-smi costs a node more than all the rest.
GPU_SECONDS = 5.0
# The problem of a node that has not given its first answer yet.
CONNECTING = "connecting ..."


@dataclass(frozen=True, kw_only=True)
class JobSample(Progress):
    """One job that runs on some of the nodes, with its progress if its experiment is here."""

    job: str
    user: str
    nodes: tuple[str, ...]
    since: float
    experiment: str = ""
    command: str = ""
    # How long it has made no step, as text.
    stalled: str = ""
    # Only filled for the job that is shown in detail.
    ranks: tuple[RankProgress, ...] = ()


@dataclass(frozen=True)
class NodeSample:
    """One node at one moment. If it could not be asked, only `problem` and `fix` are set."""

    name: str
    checkup: Checkup | None = None
    # Bytes per second since the previous sample.
    received: float | None = None
    sent: float | None = None
    problem: str = ""
    # How to fix the problem.
    fix: str = ""
    # What jobs hold of it, and what launches wait for.
    claims: tuple[ClaimEntry, ...] = ()

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
    where: Where
    # The job whose ranks are included, or EVERY.
    closer: str = ""
    # How many seconds a sample waits for slow nodes; None waits for all.
    patience: float | None = None
    # The experiments of the jobs that run, by job.
    known: dict[str, Experiment] = field(default_factory=dict)
    sought_at: float = float("-inf")

    def __post_init__(self) -> None:
        fleet.need_room_for_nodes(self.nodes)
        self.watched = [WatchedNode(node, self.transport) for node in self.nodes]

    def observe(self) -> TopSample:
        """Return a sample of all nodes, asked concurrently; a late answer is in the next one."""
        deadline = None if self.patience is None else time.monotonic() + self.patience
        for each in self.watched:
            each.begin()
        for each in self.watched:
            each.done.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if each.crash is not None:
                raise each.crash
        return self.seen()

    def seen(self) -> TopSample:
        """Return what is known now, including nodes that were not asked yet."""
        nodes = tuple(each.newest() for each in self.watched)
        return TopSample(time.time(), nodes, tuple(self.jobs(nodes)))

    def close(self) -> None:
        for each in self.watched:
            each.close()

    def jobs(self, nodes: Sequence[NodeSample]) -> list[JobSample]:
        """Return one sample per job, of what its nodes report and what its experiment here has.

        Jobs started from here come first, the oldest at the top, so a job keeps its row on the
        screen as long as possible.
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
        for each in experiments.list_experiments(self.where):
            with contextlib.suppress(OrchestratorError):
                if (job := each.read_record().job) in jobs:
                    self.known[job] = each

    def placed(self, sample: JobSample) -> JobSample:
        """Return the sample with the job's progress, and with its ranks if they are wanted."""
        # The experiment may be removed at any moment.
        with contextlib.suppress(KeyError, OSError, OrchestratorError):
            found = self.known[sample.job]
            record = found.read_record()
            how_far, ranks = progress.read_progress(found.path, record)
            closer = tuple(ranks) if self.closer in (sample.job, EVERY) else ()
            known = {
                "command": command_of(record),
                "stalled": stall_notice(found.path),
                **vars(how_far),
            }
            return replace(sample, experiment=found.name, ranks=closer, **known)
        return sample


@dataclass
class WatchedNode:
    """A node, the channel to it if one is open, and its last answer."""

    node: Node | NodeRecord
    transport: Transport
    channel: NodeChannel | None = None
    again_at: float = 0.0
    before: Load | None = None
    # The result of the last completed request.
    last: NodeSample | None = None
    # The monotonic time when that request ended, or when the first one began.
    since: float = 0.0
    # The last answer that included the GPUs.
    gpus: Checkup = field(default_factory=Checkup)
    # The entries of its lock table at that time.
    claims: tuple[ClaimEntry, ...] = ()
    gpus_at: float = float("-inf")
    # A defect of this program, raised by Watch.observe.
    crash: BaseException | None = None
    closed: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.done.set()

    def begin(self) -> None:
        """Start a request in a thread, unless one is still running."""
        if self.done.is_set():
            self.done.clear()
            self.since = self.since or time.monotonic()
            fleet.start_thread(self.look)

    def look(self) -> None:
        try:
            self.last = self.observe()
        # A defect of this program: the watch raises it.
        except BaseException as error:  # noqa: BLE001
            self.crash = error
        self.since = time.monotonic()
        if self.closed:
            self.drop()
        self.done.set()

    def newest(self) -> NodeSample:
        """Return the last answer while it is fresh enough, else a sample with a problem."""
        silent = time.monotonic() - self.since
        if self.last is not None and (self.done.is_set() or silent < STALE_SECONDS):
            return self.last
        if self.channel is None or self.last is None:
            problem = self.last.problem if self.last is not None else ""
            return NodeSample(self.node.name, problem=problem or CONNECTING)
        return NodeSample(self.node.name, problem=f"it has not answered for {silent:.0f} s")

    def observe(self) -> NodeSample:
        if self.channel is None and self.last is not None and time.monotonic() < self.again_at:
            return self.last
        try:
            if self.channel is None:
                self.again_at = time.monotonic() + PAUSE_SECONDS
                self.channel = open_serving_channel(self.transport, self.node)
            checkup = self.ask(self.channel)
        except OrchestratorError as error:
            self.drop()
            return NodeSample(self.node.name, problem=error.what, fix=error.fix)
        rates = rates_between(self.before, checkup.load)
        self.before = checkup.load
        return NodeSample(self.node.name, checkup, *rates, claims=self.claims)

    def ask(self, channel: NodeChannel) -> Checkup:
        """Return the node's load, with its GPUs as of the last GPU_SECONDS."""
        parts: tuple[str, ...] = ("load",)
        if time.monotonic() - self.gpus_at > GPU_SECONDS:
            parts = ("gpus", "load")
        checkup = channel.ask(Examine(workdir="/", parts=parts), ANSWER_SECONDS)
        if len(parts) == 1:
            return self.gpus.replace(load=checkup.load)
        self.gpus, self.gpus_at = checkup, time.monotonic()
        # A lock table may be unreadable; the node is shown without its claims.
        with contextlib.suppress(Declined):
            self.claims = channel.ask(ReadLockTable(), ANSWER_SECONDS).entries
        return checkup

    def drop(self) -> None:
        # Swapped in one statement, as another thread may drop the channel as well.
        channel, self.channel, self.before = self.channel, None, None
        self.gpus_at = float("-inf")
        if channel is not None:
            channel.connection.close()

    def close(self) -> None:
        """Close the channel; a thread that is still connecting closes its own when it is done."""
        self.closed = True
        self.drop()


def rates_between(before: Load | None, now: Load | None) -> tuple[float | None, float | None]:
    """Return the bytes per second received and sent between two samples."""
    if before is None or now is None or now.at <= before.at:
        return None, None
    seconds = now.at - before.at
    received, sent = now.received - before.received, now.sent - before.sent
    return (max(0, received) / seconds, max(0, sent) / seconds)
