"""Gathers what is known of one experiment for its page: from its record, its files and its logs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.text import plural, size
from orchestrator.config import resolved
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.screen.log_reader import tail
from orchestrator.records import checkpoint_store, goodput, manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import curves, samples, trainers
from orchestrator.records.metrics.curves import CACHE, Curve, FileSums, Measured, RankMap
from orchestrator.records.metrics.lines import Line
from orchestrator.records.metrics.samples import Events, Sample
from orchestrator.records.outcome import Verdict

LINES = 40  # of each node's log
LONGEST_LINE_CHARACTERS = 2000
LARGEST_CONFIG_CHARACTERS = 1 << 20
LARGEST_DIFF = 200_000
# What differs between ranks, and is worth a map of them.
OF_RANKS = ("step_ms", "data_ms", "forward_backward_ms", "optimizer_ms", "exposed_comm_ms")
MORE_OF_RANKS = ("memory_peak_bytes", "tokens_per_s")
SAVED, SAVED_BYTES = "saved_step", "saved_bytes"  # in the metrics, once a checkpoint is there
MOST_MOMENTS = 200
MOST_FILES = 4096  # of nodes and attempts whose events are kept


@dataclass(frozen=True)
class Moment:
    """Something that happened: when, in Unix seconds, and at which step where that is known."""

    time: float
    what: str
    step: int | None = None
    bad: bool = False
    faint: bool = False  # what it made is gone
    verdict: Verdict | None = None  # of an attempt that was not the last

    @property
    def words(self) -> str:
        """Say what happened, and at which step where that does not say it."""
        step = "" if self.step is None else f"step {self.step}"
        return self.what if step in self.what else f"{self.what} ({step})"


@dataclass(frozen=True)
class Training:
    """The metrics of one Trainer of a program; most programs have one."""

    number: int
    curves: dict[str, Curve]  # of the lowest rank
    maps: dict[str, RankMap]
    times: Curve = field(default_factory=Curve)  # when its steps were logged
    lost: bool = False  # its last loss is NaN or infinite
    unit: str = trainers.TOKENS  # what it counts


@dataclass(frozen=True)
class Story:
    """All that a page shows of one experiment."""

    experiment: Experiment
    record: JobRecord
    manifest: dict[str, Any]  # nobody has checked its values
    config: str
    trainings: list[Training]
    moments: list[Moment]
    logs: list[tuple[str, list[str]]]  # the node's name and the last lines
    machines: Machines | None = None


def read_story(experiment: Experiment, others: int = 0, *, logs: bool = True) -> Story:
    """Gather one experiment's story, for a page that shows so many others, too."""
    record = experiment.read_record()
    data, unread = manifest_of(experiment)
    points = max(200, curves.POINTS // (others + 1))
    outputs = experiment.path / "outputs"
    with CACHE.alone(outputs):
        trainings = read_trainings(outputs, points)
        of_machines = read_machines(outputs, record)
    return Story(
        experiment,
        record,
        data,
        config_text(experiment),
        trainings,
        [*moments(experiment, record, data, trainings), *unread, *closed(outputs)],
        last_lines(experiment, record) if logs else [],
        of_machines,
    )


def read_trainings(outputs: Path, points: int) -> list[Training]:
    trainings = []
    for trainer, paths in trainers.every(outputs).items():
        of_trainer = curves.curves(paths[min(paths)], points)
        times = of_trainer.pop("time", Curve())
        wanted = [name for name in (*OF_RANKS, *MORE_OF_RANKS) if name in of_trainer]
        maps = curves.rank_maps(paths, wanted) if len(paths) > 1 else {}
        if of_trainer:
            last = trainers.last(paths[min(paths)])
            trainings.append(
                Training(trainer, of_trainer, maps, times, last.loss_is_lost, last.unit)
            )
    CACHE.make_room()
    return trainings


def manifest_of(experiment: Experiment) -> tuple[dict[str, Any], list[Moment]]:
    """Return the manifest, or why there is none: a copy may have ended half-way."""
    try:
        return manifest.read(experiment), []
    except UsageError as error:
        return {}, [Moment(0.0, error.what, bad=True)]


def closed(outputs: Path) -> Iterator[Moment]:
    """Name the metrics that this login may not read: a container leaves them to root."""
    for paths in trainers.every(outputs).values():
        path = paths[min(paths)]
        try:
            files.open_plain(path).close()
        except OSError as error:
            what = f"{path.name} cannot be read: {error.strerror}; its curves are missing here"
            yield Moment(0.0, what, bad=True)


def config_text(experiment: Experiment) -> str:
    """Return the config, or why there is none: a page is made of what can be read."""
    try:
        return resolved.text(experiment.path)[:LARGEST_CONFIG_CHARACTERS]
    except UsageError as error:
        return f"# {error.what}\n"


def last_lines(experiment: Experiment, record: JobRecord) -> list[tuple[str, list[str]]]:
    logs = log_files(experiment, record.nodes)
    return [
        (f"node {log.node} ({log.label})", [cut(line) for line in tail(log, LINES, None)])
        for log in logs
    ]


def cut(line: str) -> str:
    """Leave out the middle of a line that nobody reads to its end: 64 nodes may print some."""
    half = LONGEST_LINE_CHARACTERS // 2
    return line if len(line) <= LONGEST_LINE_CHARACTERS else f"{line[:half]} ... {line[-half:]}"


def moments(
    experiment: Experiment,
    record: JobRecord,
    data: Mapping[str, Any],
    trainings: Sequence[Training],
) -> list[Moment]:
    """List what happened, in order: the start, checkpoints, skipped steps, the failure, the end."""
    timeline = data.get("timeline")
    began = timeline.get("begin") if isinstance(timeline, dict) else None
    found = [Moment(began, "launched")] if isinstance(began, float) else []
    found.append(Moment(record.started, f"started on {plural(len(record.nodes), 'node')}"))
    steps = (("ranks", "all ranks run"), ("output", "first output"))
    for name, what in steps:
        times = [node.times[name] for node in record.nodes if name in node.times]
        if times:
            found.append(Moment(max(times), what))
    for attempt in record.attempts:
        if attempt.restarted:
            title = attempt.verdict.title if attempt.verdict else attempt.state
            what = f"attempt {attempt.number} ended: {title}; started again: {attempt.why}"
            found.append(
                Moment(attempt.ended, what, attempt.step, bad=True, verdict=attempt.verdict)
            )
    verdict = record.verdict
    if verdict and record.state != "stopped":
        found.append(Moment(verdict.time, verdict.title, bad=True))
    if record.ended:
        found.append(Moment(record.ended, record.state, bad=record.state in ("failed", "lost")))
    for training in trainings:
        found += [placed(moment, training.times, record) for moment in not_finite(training)]
    first = trainings[0].times if trainings else Curve()
    found += [placed(moment, first, record) for moment in slow(record)]
    many = [*saves(experiment, record, trainings), *incidents_of_machines(experiment, record)]
    found = chosen(found, many)
    found.sort(key=in_order)
    return found


def in_order(moment: Moment) -> float:
    return moment.time or math.inf


def chosen(found: Sequence[Moment], many: Sequence[Moment]) -> list[Moment]:
    """Leave out what there may be hundreds of, never the cause of a failure or the end."""
    last = sorted(found, key=in_order)[-MOST_MOMENTS:]
    room = MOST_MOMENTS - len(last)
    if len(many) <= room:
        return [*last, *many]
    first = sorted(many, key=in_order)[:room]
    left_out = f"{len(many) - room} more checkpoints and notices of machines are left out here"
    return [*last, *first, Moment(0.0, left_out)]


def saves(
    experiment: Experiment, record: JobRecord, trainings: Sequence[Training]
) -> Iterator[Moment]:
    """List the checkpoints that are there, and those that the metrics tell and that are pruned."""
    there = set()
    for checkpoint in checkpoint_store.every(experiment.path / checkpoint_store.CHECKPOINTS):
        if checkpoint.complete and checkpoint.created:
            there.add(checkpoint.step)
            what = f"checkpoint of step {checkpoint.step}, {size(checkpoint.size)}"
            when = checkpoint.created - goodput.ahead_at(record, checkpoint.created)
            yield Moment(when, what, checkpoint.step)
    for training in trainings:
        known = training.curves.get(SAVED, Curve())
        sizes = training.curves.get(SAVED_BYTES, Curve())
        # Where several share a point of the curve, the last one is named.
        for at, saved, bytes_ in zip(known.steps, known.highs, sizes.means, strict=False):
            if (step := int(saved)) not in there:
                pruned = ", pruned since" if there else ""
                what = f"checkpoint of step {step}, {size(round(bytes_))}{pruned}"
                moment = placed(Moment(0.0, what, at), training.times, record)
                yield replace(moment, step=step, faint=bool(there))


def incidents_of_machines(experiment: Experiment, record: JobRecord) -> list[Moment]:
    """List what the log told of the nodes' machines: throttling, a full disk, swapping."""
    names = {node.index: f"node {node.index} ({node.name})" for node in record.nodes}
    clocks = {node.index: node.clock for node in record.nodes}
    return [
        Moment(event.time - ahead, f"{names.get(node, f'node {node}')}: {event.text}", bad=True)
        for node, paths in samples.every(experiment.path / "outputs").items()
        for path, ahead in samples.clocks(paths, clocks.get(node, 0.0)).items()
        for event in events_of(path, node).read()
    ]


@functools.lru_cache(MOST_FILES)
def events_of(path: Path, node: int) -> Events:
    """Keep how far each node's file is read: a page that is open looks again every few seconds,
    and within a week such a file has 70 MB."""
    return Events(path, node)


def slow(record: JobRecord) -> list[Moment]:
    """List who held the others up: the ranks found it out at a step, or the head at a time."""
    moments = []
    for found in record.slow:
        if found.step is not None or found.time is not None:
            moments.append(Moment(found.time or 0.0, found.text, found.step, bad=True))
    return moments


def placed(moment: Moment, when: Curve, record: JobRecord) -> Moment:
    """Add the time to a moment of which only the step is known; rank 0 told it by its clock."""
    if moment.step is None:
        return moment
    times = zip(when.steps, when.highs, strict=True)
    time = next((time for step, time in times if step >= moment.step), None)
    return moment if time is None else replace(moment, time=time - goodput.ahead_at(record, time))


NOT_FINITE = {  # counts in the metrics: of a Trainer's steps, and of a program's printed losses
    "skipped_steps": "skipped for NaN or inf",
    "lost_steps": "whose loss is NaN or inf",
}


def not_finite(training: Training) -> Iterator[Moment]:
    """Say how many steps had no finite loss: the metrics have their steps and no times."""
    whose = f" (Trainer {training.number})" if training.number > 1 else ""
    for name, words in NOT_FINITE.items():
        curve = training.curves.get(name, Curve())
        total = max(curve.highs, default=0.0)
        if total:
            first = next(step for step, most in zip(curve.steps, curve.highs, strict=True) if most)
            yield Moment(0.0, f"{plural(int(total), 'step')} {words}{whose}", first, bad=True)


# -- machines --------------------------------------------------------------------------------------
# What the nodes' machines did, as curves over the time of the job: a row for each node.

COLUMNS = 200
LEAST_SECONDS = 5  # of a column, or a multiple
MOST_DAYS = 400  # a clock that is wrong by years is none of the job's time


@dataclass(frozen=True)
class Machines:
    """Name of a metric -> the columns (seconds since the start) -> a value of each node there."""

    nodes: list[int]
    columns: list[int]
    values: dict[str, list[list[float | None]]]  # a row for each node

    def line(self, name: str, row: int) -> Curve:
        """Return the curve of one node."""
        pairs = [
            (at, value)
            for at, value in zip(self.columns, self.values[name][row], strict=True)
            if value is not None
        ]
        return Curve([at for at, _ in pairs], [value for _, value in pairs])

    def middle(self, name: str) -> Curve:
        """Return the mean of all nodes, and their range."""
        curve = Curve()
        for at, column in zip(self.columns, zip(*self.values[name], strict=True), strict=True):
            known = [value for value in column if value is not None]
            if known:
                curve.steps.append(at)
                curve.means.append(sum(known) / len(known))
                curve.lows.append(min(known))
                curve.highs.append(max(known))
        return curve


def read_machines(outputs: Path, record: JobRecord, columns: int = COLUMNS) -> Machines | None:
    """Read the files of all nodes; of large ones a few lines for each column."""
    ahead = {node.index: node.clock for node in record.nodes}
    every = {
        node: [
            sums_of(path, record.started + more, columns)
            for path, more in samples.clocks(paths, ahead.get(node, 0.0)).items()
        ]
        for node, paths in samples.every(outputs).items()
    }
    CACHE.make_room()
    every = {node: parts for node, parts in every.items() if any(part.columns for part in parts)}
    parts = [part for of_node in every.values() for part in of_node]
    shift, _, last = curves.shared_columns(parts, columns, 0)
    if last < 0:
        return None
    names = dict.fromkeys(name for part in parts for name in part.metrics)
    return Machines(
        list(every),
        [at * LEAST_SECONDS << shift for at in range(last + 1)],
        {name: [row_of(parts, name, shift, last) for parts in every.values()] for name in names},
    )


def sums_of(path: Path, began: float, columns: int) -> FileSums:
    """Read one file; the job began at that time by the clock of its machine."""

    def measured(line: Line) -> Measured | None:
        sample = samples.sample_of(line)
        if sample is None or not 0 <= sample.time - began < MOST_DAYS * 86400:
            return None  # a clock that is wrong by years tells nothing
        return int((sample.time - began) // LEAST_SECONDS), drawn_values(sample)

    return CACHE.read(path, began, measured, columns, 2 * columns)


def row_of(parts: Sequence[FileSums], name: str, shift: int, last: int) -> list[float | None]:
    """Return what a node did in each column: in its attempts it may have had several machines."""
    rows = [part.means(name, shift, 0, last) for part in parts]
    known = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [sum(each) / len(each) if each else None for each in known]


def drawn_values(sample: Sample) -> dict[str, float]:
    """Return what is drawn of a sample."""
    gpus = {name: [v for v in each if v is not None] for name, each in sample.gpus.items()}
    named = {
        "cpu": sample.cpu,
        "memory": sample.memory,
        "swap": sample.swap or None,
        "received": sample.received if sample.cpu is not None else None,
        "sent": sample.sent if sample.cpu is not None else None,
        "disk_read": sample.disk_read,
        "disk_write": sample.disk_write,
        "gpu": sample.gpu("use"),
        "gpu_memory": sum(gpus["memory_bytes"]) if gpus.get("memory_bytes") else None,
        "celsius": max(gpus["celsius"]) if gpus.get("celsius") else None,
        "watts": sum(gpus["watts"]) if gpus.get("watts") else None,
        "mhz": sample.gpu("mhz"),
    }
    return {name: value for name, value in named.items() if value is not None}
