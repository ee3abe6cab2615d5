"""Looks at all nodes at once, again and again, over connections that stay open.

Of a node with a job of ours the job's own stream tells what its GPUs do (records/metrics): it
comes here anyhow, and an nvidia-smi for every look would cost the node more than the sampler.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue

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
from orchestrator.records.experiment import RECORD, Experiment, JobRecord, NodeRecord
from orchestrator.records.metrics import progress, samples
from orchestrator.records.metrics.progress import Progress, RankProgress
from orchestrator.records.metrics.samples import Machine, RecentSamples
from orchestrator.records.metrics.samples import Sample as Streamed

EVERY = "*"
AGAIN_SECONDS = 5.0  # until a job whose experiment is not here is looked for once more


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
class Sample:
    time: float
    nodes: tuple[NodeSample, ...]
    jobs: tuple[JobSample, ...]


@dataclass(frozen=True)
class Known:
    """The experiment of a job that runs."""

    experiment: Experiment
    ranks: int
    steps: int | None  # in all, where its config says so
    record: JobRecord
    changed: float  # when the record was written, by the clock that wrote it here

    def newest(self) -> Known:
        """Return the same with its record of now; as it was where that is being removed."""
        with contextlib.suppress(OSError, OrchestratorError):
            changed = (self.experiment.path / RECORD).stat().st_mtime
            if changed != self.changed:
                return replace(self, record=self.experiment.read_record(), changed=changed)
        return self


@dataclass
class Watch:
    """Keeps a channel to every node, and finds the experiments of the jobs that run there."""

    transport: Transport
    nodes: Sequence[Node | NodeRecord]
    experiments: Path
    trusted: bool = False
    closer: str = ""  # the job whose ranks are looked at, too; or EVERY
    patience: float | None = None  # seconds after which a look goes without those who are late
    watched: list[WatchedNode] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)
    sought: dict[str, float] = field(default_factory=dict)  # job -> when it was looked for in vain
    answers: SimpleQueue[WatchedNode] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        fleet.need_room_for(self.nodes)
        self.watched = [WatchedNode(node, self.transport, self.answers) for node in self.nodes]

    def observe(self) -> Sample:
        """Ask all nodes at once; one that is late is in a later look."""
        self.wait()
        return self.seen()

    def seen(self) -> Sample:
        """Return what is known now, of nodes that were never asked as well."""
        nodes = tuple(each.newest() for each in self.watched)
        sample = Sample(time.time(), nodes, tuple(self.jobs(nodes)))
        self.find_streams(sample.jobs)
        return sample

    def wait(self) -> None:
        """Have all nodes look, and wait for them; who was late the last time may be done by now."""
        deadline = None if self.patience is None else time.monotonic() + self.patience
        while not self.answers.empty():
            self.answered(self.answers.get())
        for each in self.watched:
            each.begin()
        with contextlib.suppress(Empty):
            for _ in range(sum(each.busy for each in self.watched)):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self.answered(self.answers.get(timeout=left))

    def answered(self, each: WatchedNode) -> None:
        each.busy = False
        if each.crash is not None:
            raise each.crash

    def close(self) -> None:
        for each in self.watched:
            each.close()

    # -- jobs --------------------------------------------------------------------------------

    def jobs(self, nodes: Sequence[NodeSample]) -> list[JobSample]:
        """Put together what the nodes say of each job with what its experiment here says.

        Those that were started from here stand first, the oldest first of all: a place on the
        screen stays the same job's as long as it can.
        """
        found: dict[str, JobSample] = {}
        for node in nodes:
            for user in node.load.users if node.load is not None else ():
                if user.job:
                    known = found.get(user.job)
                    places = (*(known.nodes if known else ()), node.name)
                    since = min(user.since, known.since) if known else user.since
                    found[user.job] = JobSample(
                        job=user.job, user=user.user, nodes=places, since=since
                    )
        now = time.monotonic()
        self.sought = {job: at for job, at in self.sought.items() if at > now - AGAIN_SECONDS}
        unknown = found.keys() - self.known.keys() - self.sought.keys()
        if unknown:
            self.find(unknown)
            self.sought.update(dict.fromkeys(unknown - self.known.keys(), now))
        self.known = {job: self.known[job].newest() for job in self.known if job in found}
        samples = [
            placed(sample, self.known[job], closer=self.closer in (job, EVERY))
            if job in self.known
            else sample
            for job, sample in found.items()
        ]
        return sorted(samples, key=lambda sample: (not sample.experiment, sample.since))

    def find(self, jobs: set[str]) -> None:
        for each in experiments.every(self.experiments, trusted=self.trusted):
            try:
                record = each.read_record()
            except OrchestratorError:
                continue
            if record.job in jobs:
                count = sum(node.nproc for node in record.nodes)
                steps = progress.all_steps(each.path, record)
                self.known[record.job] = Known(each, count, steps, record, changed=0.0)

    def find_streams(self, jobs: Sequence[JobSample]) -> None:
        """Find the streams of the nodes on which jobs of ours run, and forget all others."""
        paths = {}
        for job in jobs:
            if job.job in self.known:
                outputs = self.known[job.job].experiment.path / "outputs"
                files_of = samples.every(outputs)
                for node in self.known[job.job].record.nodes:
                    if node.index in files_of:
                        paths[node.name] = files_of[node.index][-1]
        for each in self.watched:
            each.follow(paths.get(each.node.name))


def placed(sample: JobSample, known: Known, *, closer: bool = False) -> JobSample:
    """Add how far a job is, as far as its metrics tell it; closer: each of its ranks, too."""
    how_far, each = progress.of(known.experiment.path, known.record, known.steps)
    close = tuple(each) if closer else ()
    return replace(sample, experiment=known.experiment.name, ranks=close, **vars(how_far))


# -- one node --------------------------------------------------------------------------------------
# A channel that stays open, and a task that asks when it is told to.

ANSWER_SECONDS = 20.0
RETRY_SECONDS = 5.0  # a node that is lost is tried again so often
STALE_SECONDS = 5.0  # an answer that is older is not shown as if it were of now
PARTS = ("gpus", "load")
KEPT = 32  # looks, for the small curves
FRESH_SECONDS = 15.0  # a stream that brought nothing for longer tells nothing of now
HOLDERS_SECONDS = 30.0  # between two questions who holds the GPUs, where the stream tells the rest


@dataclass(frozen=True)
class Point:
    """The values of one look that small curves show: shares from 0 to 1, bytes a second."""

    cpu: float | None
    gpu: float | None
    net: float | None


@dataclass(frozen=True)
class NodeSample:
    """One node at one moment; where `problem` says why it could not be asked, nothing else."""

    name: str
    checkup: Checkup | None = None
    received: float | None = None  # bytes per second since the last look
    sent: float | None = None
    problem: str = ""
    fix: str = ""  # of the problem
    history: tuple[Point, ...] = ()  # the newest last

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.checkup.gpus or () if self.checkup is not None else ()

    @property
    def load(self) -> Load | None:
        return self.checkup.load if self.checkup is not None else None


@dataclass
class Stream:
    """The newest samples of one node's stream, and when the last one came."""

    recent: RecentSamples
    grown: float = 0.0  # monotonic
    newest: float = 0.0

    def observe(self) -> tuple[Streamed, ...]:
        samples = tuple(self.recent.read())
        if samples and samples[-1].time != self.newest:
            first, self.newest = not self.newest, samples[-1].time
            # What was there before us may be old.
            self.grown = 0.0 if first and not recently(self.recent) else time.monotonic()
        return samples

    @property
    def fresh(self) -> bool:
        return bool(self.grown) and time.monotonic() - self.grown < FRESH_SECONDS


def recently(recent: RecentSamples) -> bool:
    """Tell whether a file has grown lately, by the clock that wrote it here."""
    try:
        return time.time() - recent.path.stat().st_mtime < FRESH_SECONDS
    except OSError:
        return False


@dataclass
class WatchedNode:
    """A node, the channel to it while there is one, and what it said last."""

    node: Node | NodeRecord
    transport: Transport
    answers: SimpleQueue[WatchedNode]  # hears of every look that is over
    channel: NodeChannel | None = None
    again_at: float = 0.0
    before: Load | None = None
    problem: str = ""
    fix: str = ""
    history: deque[Point] = field(default_factory=lambda: deque(maxlen=KEPT))
    stream: Stream | None = None  # while a job of ours runs there
    gpus_at: float = float("-inf")  # monotonic: when the node was last asked for its GPUs
    last: Checkup | None = None  # what it said then
    sample: NodeSample | None = None  # of the last look that is over
    since: float = 0.0  # monotonic: when that was, or the first look began
    crash: BaseException | None = None  # a defect of ours
    busy: bool = False
    closed: bool = False
    orders: queue.SimpleQueue[bool] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        fleet.start(self.work)

    def begin(self) -> None:
        """Have the task look, unless it still does."""
        if not self.busy:
            self.busy = True
            self.since = self.since or time.monotonic()
            self.orders.put(True)

    def work(self) -> None:
        while self.orders.get():
            try:
                self.sample = self.observe()
            except BaseException as error:  # noqa: BLE001  a defect of ours: raised by the watch
                self.crash = error
            self.since = time.monotonic()
            if self.closed:
                self.drop()
            self.answers.put(self)

    def newest(self) -> NodeSample:
        """Return what the node said last, while that is as good as new."""
        silent = time.monotonic() - self.since
        if self.sample is not None and (not self.busy or silent < STALE_SECONDS):
            return self.sample
        if self.channel is None:
            return NodeSample(self.node.name, problem=self.problem or "connecting ...")
        return NodeSample(self.node.name, problem=f"it has not answered for {silent:.0f} s")

    def observe(self) -> NodeSample:
        name = self.node.name
        if self.channel is None:
            if time.monotonic() < self.again_at:
                return NodeSample(name, problem=self.problem, fix=self.fix)
            self.again_at = time.monotonic() + RETRY_SECONDS
        try:
            if self.channel is None:
                self.channel = serving(self.transport, self.node)
            checkup = self.ask(self.channel)
        except OrchestratorError as error:
            self.drop()
            self.problem, self.fix = error.what, error.fix
            return NodeSample(name, problem=error.what, fix=error.fix)
        rates = rates_between(self.before, checkup.load)
        self.before = checkup.load
        self.history.append(point_of(checkup, rates))
        return NodeSample(name, checkup, *rates, history=tuple(self.history))

    def ask(self, channel: NodeChannel) -> Checkup:
        """Ask a node for its load; for its GPUs where no stream tells of them."""
        stream, last = self.stream, self.last
        streamed = stream.observe() if stream is not None else ()
        age = time.monotonic() - self.gpus_at
        if stream is not None and stream.fresh and last is not None and age < HOLDERS_SECONDS:
            load = self.examined(channel, ("load",)).load
            machine = stream.recent.machine
            if last.gpus is None:
                return last.replace(load=load)
            gpus = tuple(with_stream(gpu, machine, streamed[-1]) for gpu in last.gpus)
            return last.replace(load=load, gpus=gpus)
        checkup = self.examined(channel, PARTS)
        self.last, self.gpus_at = checkup, time.monotonic()
        return checkup

    @staticmethod
    def examined(channel: NodeChannel, parts: tuple[str, ...]) -> Checkup:
        return clock.checkup_now(channel.ask(Examine(workdir="/", parts=parts), ANSWER_SECONDS))

    def follow(self, path: Path | None) -> None:
        """Take the stream of a job that runs there, or none."""
        if path is None:
            self.stream = None
        elif self.stream is None or self.stream.recent.path != path:
            stream = Stream(RecentSamples(path, KEPT))
            if len(self.history) < 2:  # the past, as far as the stream knows it
                self.history.extendleft(map(point_streamed, reversed(stream.observe())))
            self.stream = stream

    def drop(self) -> None:
        channel, self.channel, self.before = self.channel, None, None  # another thread does, too
        if channel is not None:
            channel.connection.close()

    def close(self) -> None:
        """Hang up; a thread that is connecting does so when it is connected."""
        self.closed = True
        self.orders.put(False)
        self.drop()


def with_stream(gpu: Gpu, machine: Machine, sample: Streamed) -> Gpu:
    """Return a GPU as the job's stream saw it last; as it was where the stream has not seen it."""
    # By its address: a GPU that is lost is in one list and not in the other.
    if not gpu.pci or machine.places.count(gpu.pci) != 1:
        return gpu
    at = machine.places.index(gpu.pci)

    def value(name: str, unit: float = 1.0) -> int | None:
        column = sample.gpus.get(name, [])
        known = column[at] if at < len(column) else None
        return None if known is None else round(known * unit)

    fresh = {
        "busy": value("use", 100),
        "used": value("memory_bytes"),
        "temperature": value("celsius"),
    }
    return gpu.replace(**{name: known for name, known in fresh.items() if known is not None})


def point_of(checkup: Checkup, rates: tuple[float | None, float | None]) -> Point:
    busy = [gpu.busy for gpu in checkup.gpus or () if gpu.busy is not None]
    load = checkup.load
    return Point(
        None if load is None else load.cores / max(1, load.cpus),
        sum(busy) / len(busy) / 100 if busy else None,
        None if rates[0] is None or rates[1] is None else rates[0] + rates[1],
    )


def point_streamed(sample: Streamed) -> Point:
    return Point(sample.cpu, sample.gpu("use"), sample.received + sample.sent)


def rates_between(before: Load | None, now: Load | None) -> tuple[float | None, float | None]:
    """Return the bytes per second that came and went between two looks."""
    if before is None or now is None or now.at <= before.at:
        return None, None
    seconds = now.at - before.at
    received, sent = now.received - before.received, now.sent - before.sent
    return (max(0, received) / seconds, max(0, sent) / seconds)
