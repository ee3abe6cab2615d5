"""Looks at all nodes at once, again and again, over connections that stay open.

Of a node with a job of ours the job's own stream tells what its GPUs do (records/node_metrics.py):
it comes here anyhow, and an nvidia-smi for every look would cost the node more than the sampler.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.top import progress
from orchestrator.head.top.ranks import RankSample, ranks
from orchestrator.protocol.facts import Checkup, Gpu, Load
from orchestrator.protocol.messages import Examine
from orchestrator.records import experiment, node_metrics
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.node_metrics import NodeSample as Streamed
from orchestrator.records.node_metrics import Recent

ANSWER_SECONDS = 20.0
RETRY_SECONDS = 5.0  # a node that is lost is tried again so often
PARTS = ("gpus", "load")
EVERY = "*"
KEPT = 32  # looks, for the small curves
FRESH = 15.0  # seconds: a stream that brought nothing for longer tells nothing of now
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
    history: tuple[Point, ...] = ()  # the newest last

    @property
    def load(self) -> Load | None:
        return self.checkup.load if self.checkup is not None else None


@dataclass(frozen=True)
class JobSample:
    """One job that runs on some of the nodes, and how far it is where its experiment is here."""

    job: str
    user: str
    nodes: tuple[str, ...]
    since: float
    experiment: str = ""
    step: int | None = None
    steps: int | None = None  # in all, where that is known
    loss: float | None = None
    rate: float | None = None  # tokens, targets or samples per second
    left: float | None = None  # seconds
    slowest: str = ""  # the rank that keeps the others waiting
    ranks: tuple[RankSample, ...] = ()  # of the job that is looked at closer


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


@dataclass
class Stream:
    """The newest samples of one node's stream, and when the last one came."""

    recent: Recent
    grown: float = 0.0  # monotonic
    newest: float = 0.0

    def look(self) -> tuple[Streamed, ...]:
        samples = tuple(self.recent.look())
        if samples and samples[-1].time != self.newest:
            first, self.newest = not self.newest, samples[-1].time
            # What was there before us may be old.
            self.grown = 0.0 if first and not recently(self.recent) else time.monotonic()
        return samples

    @property
    def fresh(self) -> bool:
        return bool(self.grown) and time.monotonic() - self.grown < FRESH


def recently(recent: Recent) -> bool:
    """Tell whether a file has grown lately, by the clock that wrote it here."""
    try:
        return time.time() - recent.path.stat().st_mtime < FRESH
    except OSError:
        return False


@dataclass
class Watched:
    """A node, and the channel to it while there is one."""

    node: Node | NodeRecord
    channel: NodeChannel | None = None
    again_at: float = 0.0
    before: Load | None = None
    problem: str = ""
    history: deque[Point] = field(default_factory=lambda: deque(maxlen=KEPT))
    stream: Stream | None = None  # while a job of ours runs there
    gpus_at: float = float("-inf")  # monotonic: when the node was last asked for its GPUs
    last: Checkup | None = None  # what it said then


@dataclass
class Watch:
    """Keeps a channel to every node, and finds the experiments of the jobs that run there."""

    transport: Transport
    nodes: Sequence[Node | NodeRecord]
    experiments: Path
    trusted: bool = False
    closer: str = ""  # the job whose ranks are looked at, too; or EVERY
    watched: list[Watched] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watched = [Watched(node) for node in self.nodes]

    def look(self) -> Sample:
        """Ask all nodes at once; one that does not answer holds nobody up for longer than that."""
        results = fleet.everywhere(self.watched, self.look_at)
        nodes = [
            NodeSample(each.node.name, problem=result.what)
            if isinstance(result, OrchestratorError)
            else result
            for each, result in zip(self.watched, results, strict=True)
        ]
        sample = Sample(time.time(), tuple(nodes), tuple(self.jobs(nodes)))
        self.find_streams(sample.jobs)
        return sample

    def look_at(self, watched: Watched) -> NodeSample:
        name = watched.node.name
        if watched.channel is None:
            if time.monotonic() < watched.again_at:
                return NodeSample(name, problem=watched.problem)
            watched.again_at = time.monotonic() + RETRY_SECONDS
        try:
            if watched.channel is None:
                connection = self.transport.connect(self.transport.config.of_node(watched.node))
                timeout = self.transport.timeout
                watched.channel = open_channel(connection, watched.node, timeout)
            checkup = ask(watched.channel, watched)
        except OrchestratorError as error:
            self.drop(watched)
            watched.problem = error.what
            return NodeSample(name, problem=error.what)
        rates = rates_between(watched.before, checkup.load)
        watched.before = checkup.load
        watched.history.append(point_of(checkup, rates))
        return NodeSample(name, checkup, *rates, history=tuple(watched.history))

    def drop(self, watched: Watched) -> None:
        if watched.channel is not None:
            watched.channel.connection.close()
        watched.channel = watched.before = None

    def close(self) -> None:
        for watched in self.watched:
            self.drop(watched)

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
                    found[user.job] = JobSample(user.job, user.user, places, since)
        unknown = found.keys() - self.known.keys()
        if unknown:
            self.find(unknown)
        self.known = {job: self.known[job] for job in self.known if job in found}
        samples = [
            placed(sample, self.known[job], closer=self.closer in (job, EVERY))
            if job in self.known
            else sample
            for job, sample in found.items()
        ]
        return sorted(samples, key=lambda sample: (not sample.experiment, sample.since))

    def find(self, jobs: set[str]) -> None:
        for each in experiment.every(self.experiments, trusted=self.trusted):
            try:
                record = each.read_record()
            except OrchestratorError:
                continue
            if record.job in jobs:
                count = sum(node.nproc for node in record.nodes)
                self.known[record.job] = Known(each, count, progress.all_steps(each.path), record)

    def find_streams(self, jobs: Sequence[JobSample]) -> None:
        """Find the streams of the nodes on which jobs of ours run, and forget all others."""
        paths = {}
        for job in jobs:
            if job.job in self.known:
                outputs = self.known[job.job].experiment.path / "outputs"
                files_of = node_metrics.every(outputs)
                for node in self.known[job.job].record.nodes:
                    if node.index in files_of:
                        paths[node.name] = files_of[node.index][-1]
        for watched in self.watched:
            path = paths.get(watched.node.name)
            if path is None:
                watched.stream = None
            elif watched.stream is None or watched.stream.recent.path != path:
                watched.stream = Stream(Recent(path, KEPT))
                if len(watched.history) < 2:  # the past, as far as the stream knows it
                    streamed = watched.stream.look()
                    watched.history.extendleft(map(point_streamed, reversed(streamed)))


def ask(channel: NodeChannel, watched: Watched) -> Checkup:
    """Ask a node for its load; for its GPUs where no stream tells of them."""
    streamed = watched.stream.look() if watched.stream is not None else ()
    age = time.monotonic() - watched.gpus_at
    stream, last = watched.stream, watched.last
    if stream is not None and stream.fresh and last is not None and age < HOLDERS_SECONDS:
        load = channel.ask(Examine(workdir="/", parts=("load",)), ANSWER_SECONDS).checkup.load
        gpus = tuple(with_stream(gpu, i, streamed[-1]) for i, gpu in enumerate(last.gpus or ()))
        return last.replace(load=load, gpus=gpus)
    checkup = channel.ask(Examine(workdir="/", parts=PARTS), ANSWER_SECONDS).checkup
    watched.last, watched.gpus_at = checkup, time.monotonic()
    return checkup


def with_stream(gpu: Gpu, at: int, sample: Streamed) -> Gpu:
    """Return a GPU as the job's stream saw it last."""

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


def placed(sample: JobSample, known: Known, *, closer: bool = False) -> JobSample:
    """Add how far a job is, as far as its metrics tell it; closer: each of its ranks, too."""
    record = known.record
    if closer:
        with contextlib.suppress(OrchestratorError):  # removed while it is looked at
            record = known.experiment.read_record()
    each = ranks(known.experiment, record)
    how_far = progress.of(known.experiment.path, each, known.steps)
    own = tuple(each) if closer else ()
    return replace(sample, experiment=known.experiment.name, ranks=own, **vars(how_far))
