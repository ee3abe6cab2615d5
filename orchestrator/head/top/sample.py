"""Looks at all nodes at once, again and again, over connections that stay open."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator import files
from orchestrator.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.inventory.node_list import Node
from orchestrator.protocol.facts import Checkup, Load
from orchestrator.protocol.messages import Examine
from orchestrator.records import experiment
from orchestrator.records.experiment import Experiment
from orchestrator.records.last_metrics import last_metrics, number

ANSWER_SECONDS = 20.0
RETRY_SECONDS = 5.0  # a node that is lost is tried again so often
PARTS = ("gpus", "load")
LARGEST_CONFIG = 1 << 20


@dataclass(frozen=True)
class NodeSample:
    """One node at one moment; where `problem` says why it could not be asked, nothing else."""

    name: str
    checkup: Checkup | None = None
    received: float | None = None  # bytes per second since the last look
    sent: float | None = None
    problem: str = ""

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


@dataclass
class Watched:
    """A node, and the channel to it while there is one."""

    node: Node
    channel: NodeChannel | None = None
    again_at: float = 0.0
    before: Load | None = None
    problem: str = ""


@dataclass
class Watch:
    """Keeps a channel to every node, and finds the experiments of the jobs that run there."""

    transport: Transport
    nodes: Sequence[Node]
    experiments: Path
    trusted: bool = False
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
        return Sample(time.time(), tuple(nodes), tuple(self.jobs(nodes)))

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
            question = Examine(workdir="/", parts=PARTS)
            checkup = watched.channel.ask(question, ANSWER_SECONDS).checkup
        except OrchestratorError as error:
            self.drop(watched)
            watched.problem = error.what
            return NodeSample(name, problem=error.what)
        rates = rates_between(watched.before, checkup.load)
        watched.before = checkup.load
        return NodeSample(name, checkup, *rates)

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
            progress(sample, self.known[job]) if job in self.known else sample
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
                ranks = sum(node.nproc for node in record.nodes)
                self.known[record.job] = Known(each, ranks, all_steps(each))


def rates_between(before: Load | None, now: Load | None) -> tuple[float | None, float | None]:
    """Return the bytes per second that came and went between two looks."""
    if before is None or now is None or now.at <= before.at:
        return None, None
    seconds = now.at - before.at
    received, sent = now.received - before.received, now.sent - before.sent
    return (max(0, received) / seconds, max(0, sent) / seconds)


def all_steps(found: Experiment) -> int | None:
    """Return how many steps the built-in training was told to do."""
    try:
        with files.open_plain(found.path / "config.yaml") as file:
            config = yaml.safe_load(file.read(LARGEST_CONFIG))
        steps = config["training"]["max_steps"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return steps if type(steps) is int else None


def progress(sample: JobSample, known: Known) -> JobSample:
    """Add the step, the loss and the time that is left, as far as the metrics tell them."""
    lines = [last_metrics(known.experiment.path, rank) for rank in range(known.ranks)]
    line = lines[0] if lines else {}
    step, step_ms = number(line, "step"), number(line, "step_ms")
    left = None
    if step is not None and step_ms is not None and known.steps is not None:
        left = max(0.0, known.steps - step) * step_ms / 1e3
    return replace(
        sample,
        experiment=known.experiment.name,
        step=None if step is None else int(step),
        steps=None if step is None else known.steps,
        loss=number(line, "loss"),
        rate=number(line, "tokens_per_s"),
        left=left,
        slowest=slowest(lines),
    )


def slowest(lines: Sequence[dict[str, Any]]) -> str:
    """Name the rank that computes or waits for data much longer than the median rank."""
    own = {
        rank: (number(line, "data_ms") or 0.0) + (number(line, "forward_backward_ms") or 0.0)
        for rank, line in enumerate(lines)
        if line
    }
    whole = number(lines[0], "step_ms") if lines and lines[0] else None
    if len(own) < 2 or not whole:
        return ""
    middle = statistics.median_low(own.values())
    rank = max(own, key=lambda each: own[each])
    more = (own[rank] - middle) / whole
    return f"rank {rank} +{more:.0%}" if more > 0.1 else ""
