"""Looks at all nodes at once, again and again, over connections that stay open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.node_list import Node
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.metrics import progress, samples
from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.top.watched_node import NodeSample, WatchedNode

EVERY = "*"
AGAIN = 5.0  # seconds until a job whose experiment is not here is looked for once more


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
    ranks: tuple[RankProgress, ...] = ()  # of the job that is looked at closer
    trainer: int = 1  # whose step it is, where the program has several
    lost: bool = False  # its loss is NaN or infinite


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
    told: SimpleQueue[WatchedNode] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        fleet.raise_limit()
        self.watched = [WatchedNode(node, self.transport, self.told) for node in self.nodes]

    def look(self) -> Sample:
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
        while not self.told.empty():
            self.answered(self.told.get())
        for each in self.watched:
            each.begin()
        with contextlib.suppress(Empty):
            for _ in range(sum(each.busy for each in self.watched)):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self.answered(self.told.get(timeout=left))

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
                    found[user.job] = JobSample(user.job, user.user, places, since)
        now = time.monotonic()
        self.sought = {job: at for job, at in self.sought.items() if at > now - AGAIN}
        unknown = found.keys() - self.known.keys() - self.sought.keys()
        if unknown:
            self.find(unknown)
            self.sought.update(dict.fromkeys(unknown - self.known.keys(), now))
        self.known = {job: self.known[job] for job in self.known if job in found}
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
                self.known[record.job] = Known(each, count, steps, record)

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
    record = known.record
    if closer:
        with contextlib.suppress(OrchestratorError):  # removed while it is looked at
            record = known.experiment.read_record()
    how_far, each = progress.of(known.experiment.path, record, known.steps)
    own = tuple(each) if closer else ()
    return replace(sample, experiment=known.experiment.name, ranks=own, **vars(how_far))
