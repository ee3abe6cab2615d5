"""Gathers the data of one experiment's page from its record, files and logs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.text import format_bytes, plural
from orchestrator.config import resolved
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.screen.log_reader import tail_lines
from orchestrator.records import checkpoint_store, goodput, manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import curves, samples, trainers
from orchestrator.records.metrics.curves import Curve, CurveSums
from orchestrator.records.metrics.lines import sampled_lines
from orchestrator.records.metrics.samples import Sample
from orchestrator.records.outcome import JobVerdict

# The last lines of each node's log.
LINES = 40
LONGEST_LINE_CHARACTERS = 2000
LARGEST_CONFIG_CHARACTERS = 1 << 20
MACHINE_COLUMNS = 200
# In place of a node: the samples of all nodes together.
ALL_NODES = -1
# Later samples are dropped, as their clock is wrong by years.
MOST_DAYS = 400
# Metrics that count steps without a finite loss: of a Trainer, and of printed losses.
NOT_FINITE = {
    "skipped_steps": "skipped for NaN or inf",
    "lost_steps": "whose loss is NaN or inf",
}


@dataclass(frozen=True)
class Moment:
    """Something that happened: the Unix time, and the step if it is known."""

    time: float
    what: str
    step: int | None = None
    bad: bool = False
    # The verdict of an attempt that was not the last.
    verdict: JobVerdict | None = None

    @property
    def words(self) -> str:
        """Return the event, with its step unless the text names it."""
        step = "" if self.step is None else f"step {self.step}"
        return self.what if step in self.what else f"{self.what} ({step})"


@dataclass(frozen=True)
class TrainingData:
    """The metrics of a program's newest Trainer; most programs have one."""

    # The metrics of the lowest rank.
    curves: dict[str, Curve] = field(default_factory=dict)
    # The time when each of its steps was logged.
    times: Curve = field(default_factory=Curve)
    # Set if its last loss is NaN or infinite.
    lost: bool = False
    # The unit that it counts.
    unit: str = trainers.TOKENS


@dataclass(frozen=True)
class RunData:
    """All data that a page shows of one experiment."""

    experiment: Experiment
    record: JobRecord
    # Values in it are not checked.
    manifest: dict[str, Any]
    config: str
    training: TrainingData
    moments: list[Moment]
    # The node's name and the last lines.
    logs: list[tuple[str, list[str]]]
    # The curves of each node by name, over the seconds since the start.
    machines: dict[int, dict[str, Curve]]


def read_run_data(experiment: Experiment, others: int = 0) -> RunData:
    """Gather one experiment's data, for a page that also shows `others` more."""
    record = experiment.read_record()
    data, unread = manifest_of(experiment)
    outputs = experiment.path / "outputs"
    training = read_training(outputs, max(200, curves.POINTS // (others + 1)))
    return RunData(
        experiment,
        record,
        data,
        config_text(experiment),
        training,
        [*moments(experiment, record, data, training), *unread, *unreadable_metrics(outputs)],
        last_lines(experiment, record),
        read_machines(outputs, record),
    )


def read_training(outputs: Path, points: int) -> TrainingData:
    path = trainers.file_of_first_rank(outputs)
    if path is None:
        return TrainingData()
    known, last = curves.rank_curves(path, points), trainers.read_last_values(path)
    times = known.pop("time", Curve())
    return TrainingData(known, times, last.loss_is_lost, last.unit)


def manifest_of(experiment: Experiment) -> tuple[dict[str, Any], list[Moment]]:
    """Return the manifest, or why there is none: a copy may have ended half-way."""
    try:
        return manifest.read_manifest(experiment), []
    except UsageError as error:
        return {}, [Moment(0.0, error.what, bad=True)]


def unreadable_metrics(outputs: Path) -> Iterator[Moment]:
    """Yield the metrics that this login may not read: a container leaves them to root."""
    path = trainers.file_of_first_rank(outputs)
    try:
        if path is not None:
            files.open_plain(path).close()
    except OSError as error:
        what = f"{path and path.name} cannot be read: {error.strerror}; its curves are missing here"
        yield Moment(0.0, what, bad=True)


def config_text(experiment: Experiment) -> str:
    """Return the config, or why there is none: a page is made of the readable files."""
    try:
        return resolved.read_text(experiment.path)[:LARGEST_CONFIG_CHARACTERS]
    except UsageError as error:
        return f"# {error.what}\n"


def last_lines(experiment: Experiment, record: JobRecord) -> list[tuple[str, list[str]]]:
    found = []
    for log in log_files(experiment, record.nodes):
        try:
            lines = tail_lines(log, LINES, None)
        # It may be a link, or a file that this login may not read.
        except OSError as error:
            lines = [f"{log.text.name} cannot be read: {error.strerror}"]
        found.append((f"node {log.node} ({log.label})", [cut(line) for line in lines]))
    return found


def cut(line: str) -> str:
    """Cut the middle out of a very long line, as 64 nodes may print many of them."""
    half = LONGEST_LINE_CHARACTERS // 2
    return line if len(line) <= LONGEST_LINE_CHARACTERS else f"{line[:half]} ... {line[-half:]}"


# -- what happened --------------------------------------------------------------------------------


def moments(
    experiment: Experiment,
    record: JobRecord,
    data: Mapping[str, Any],
    training: TrainingData,
) -> list[Moment]:
    """List the events in order: the start, checkpoints, skipped steps, the failure, the end."""
    timeline = data.get("timeline")
    began = timeline.get("begin") if isinstance(timeline, dict) else None
    found = [Moment(began, "launched")] if isinstance(began, float) else []
    found.append(Moment(record.started, f"started on {plural(len(record.nodes), 'node')}"))
    for name, what in (("ranks", "all ranks run"), ("output", "first output")):
        times = [node.times[name] for node in record.nodes if name in node.times]
        if times:
            found.append(Moment(max(times), what))
    for attempt in record.attempts:
        if attempt.restarted:
            title = attempt.verdict.title if attempt.verdict else attempt.state
            what = f"attempt {attempt.number} ended: {title}; started again: {attempt.why}"
            of = attempt.verdict
            found.append(Moment(attempt.ended, what, attempt.step, bad=True, verdict=of))
    if record.verdict and record.state != "stopped":
        found.append(Moment(record.verdict.time, record.verdict.title, bad=True))
    if record.ended:
        found.append(Moment(record.ended, record.state, bad=record.state in ("failed", "lost")))
    found += not_finite(training, record)
    found += [
        placed(Moment(each.time or 0.0, each.text, each.step, bad=True), training.times, record)
        for each in record.slow
        if each.step is not None or each.time is not None
    ]
    found += saves(experiment, record)
    return sorted(found, key=lambda moment: moment.time or math.inf)


def saves(experiment: Experiment, record: JobRecord) -> Iterator[Moment]:
    """Yield the complete checkpoints."""
    for checkpoint in checkpoint_store.list_checkpoints(
        experiment.path / checkpoint_store.CHECKPOINTS
    ):
        if checkpoint.complete and checkpoint.created:
            what = f"checkpoint of step {checkpoint.step}, {format_bytes(checkpoint.size)}"
            when = goodput.head_time(record, checkpoint.created)
            yield Moment(when, what, checkpoint.step)


def placed(moment: Moment, when: Curve, record: JobRecord) -> Moment:
    """Add the time to a moment if only its step is known, by the clock of rank 0."""
    if moment.step is None:
        return moment
    times = zip(when.steps, when.highs, strict=True)
    time = next((time for step, time in times if step >= moment.step), None)
    return moment if time is None else replace(moment, time=goodput.head_time(record, time))


def not_finite(training: TrainingData, record: JobRecord) -> Iterator[Moment]:
    """Yield how many steps had no finite loss: the metrics have their steps and no times."""
    for name, words in NOT_FINITE.items():
        curve = training.curves.get(name, Curve())
        if total := max(curve.highs, default=0.0):
            first = next(step for step, most in zip(curve.steps, curve.highs, strict=True) if most)
            what = f"{plural(int(total), 'step')} {words}"
            yield placed(Moment(0.0, what, first, bad=True), training.times, record)


# -- machines -------------------------------------------------------------------------------------


def read_machines(outputs: Path, record: JobRecord) -> dict[int, dict[str, Curve]]:
    """Read the samples of all nodes; of large files a few lines for each column."""
    sums: dict[int, CurveSums] = {}
    for node, paths in samples.list_sample_files(outputs).items():
        for path in paths:
            for line in sampled_lines(path, 2 * MACHINE_COLUMNS):
                if (sample := samples.sample_of(line)) is None:
                    continue
                second = int(goodput.head_time(record, sample.time, node) - record.started)
                for of in (node, ALL_NODES) if 0 <= second < MOST_DAYS * 86400 else ():
                    known = sums.setdefault(of, CurveSums(MACHINE_COLUMNS))
                    known.add(second, drawn_values(sample))
    return {of: known.curves(MACHINE_COLUMNS) for of, known in sums.items()}


def drawn_values(sample: Sample) -> dict[str, float]:
    """Return the values of a sample that have a chart."""
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
