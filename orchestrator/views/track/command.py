"""`orchestrator track`: sends the metrics of jobs to trackers and to Prometheus."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UsageError
from orchestrator.common.files import open_plain
from orchestrator.common.hosts import host_in_url, is_loopback
from orchestrator.common.text import plural
from orchestrator.config.launch import Where
from orchestrator.config.parse import check_one_of
from orchestrator.head.screen.events import say
from orchestrator.head.status.status import find_experiment
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.goodput import head_time
from orchestrator.records.metrics import samples, trainers
from orchestrator.records.metrics.lines import GrowingFile, Line
from orchestrator.records.metrics.samples import Sample
from orchestrator.trackers.known import KNOWN, Curves, import_tracker, open_tracker

# A lock in the experiment, held by the process that tracks it.
TRACKING = ".tracking"
# The time between two reads of files that grow.
LOOK_SECONDS = 2.0
LONGEST_TOKEN = 4096


def track(where: Where, wanted: str | None, names: Sequence[str], options: Sequence[str]) -> int:
    """Send the metrics of a job to trackers until it is over, or until Ctrl-C."""
    for name in names:
        check_one_of("--to", name, tuple(KNOWN))
        import_tracker(KNOWN[name].package, KNOWN[name].imports)
    parameters = parsed(options, names)
    experiment = find_experiment(where, wanted)
    if experiment is None:
        raise experiments.missing_experiment(where, wanted)
    if not experiment.hold(TRACKING):
        raise UsageError(f"{experiment.name} is tracked already, by another process")
    say(
        f"passing {experiment.name} on to {', '.join(names)}; Ctrl-C ends it, and the job continues"
    )
    tracking = Tracking(experiment, {name: parameters.get(name, {}) for name in names})
    code = EXIT_DONE
    try:
        tracking.until_over()
    except KeyboardInterrupt:
        code = EXIT_STOPPED
    finally:
        tracking.close()
    lines = sum(each.sent for each in tracking.passing.values())
    say(f"{plural(lines, 'line')} of {experiment.name} passed on to {', '.join(names)}")
    return EXIT_FAILED if tracking.failed else code


@dataclass
class Tracking:
    """A job, the trackers that receive its metrics, and those that failed."""

    experiment: Experiment
    # The options of each tracker.
    options: Mapping[str, Mapping[str, Any]]
    # Keyed by kind and tracker.
    passing: dict[tuple[str, str], PassingOn] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def until_over(self) -> None:
        """Send new values repeatedly until the job is over or all trackers have failed."""
        record, warned = self.experiment.read_record(), False
        while True:
            self.look(record)
            if record.over or self.failed == self.options.keys():
                return
            if not warned and not self.experiment.followed and not record.head_elsewhere:
                say(
                    f"nothing follows {self.experiment.name}, so its numbers may stay on the"
                    f" nodes: orchestrator attach {self.experiment.name}"
                )
                warned = True
            time.sleep(LOOK_SECONDS)
            record = self.experiment.read_record()

    def look(self, record: JobRecord) -> None:
        """Send new values to each tracker that has not failed."""
        for name, kind in product(self.options, KINDS):
            if name in self.failed:
                continue
            what = "could not be opened, and gets no values"
            try:
                if (kind, name) not in self.passing:
                    own = PassingOn(self.experiment, record, kind, name, self.options[name])
                    self.passing[kind, name] = own
                what = "failed and is switched off from now on"
                self.passing[kind, name].pass_on(record)
            except UsageError:
                # An option that the tracker does not know is the user's error.
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self.failed.add(name)
                say(f"WARNING: {name} {what}: {str(error) or type(error).__name__}")

    def close(self) -> None:
        for each in self.passing.values():
            if each.name not in self.failed:
                # A failure to close loses nothing that was sent.
                with contextlib.suppress(Exception):
                    each.tracker.close()


def parsed(options: Sequence[str], names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """Return the values of --set TRACKER.OPTION=VALUE, by tracker and option."""
    found: dict[str, dict[str, Any]] = {}
    for option in options:
        key, equals, value = option.partition("=")
        tracker, dot, name = key.partition(".")
        if not (equals and dot and name and tracker in names):
            raise UsageError(
                f"--set {option}: not TRACKER.OPTION=VALUE with a tracker that --to names",
                f"such as: --set {names[0]}.{'project=p' if names[0] == 'wandb' else 'name=value'}",
            )
        found.setdefault(tracker, {})[name] = value
    return found


def metrics(where: Where, host: str, port: int, token_file: Path | None) -> int:
    """Serve the state of all jobs to Prometheus until Ctrl-C."""
    token = token_of(host, token_file)
    # Imported here, as a tracker needs no server.
    from orchestrator.views.serve import listen_on_port, serve_app
    from orchestrator.views.track import exposition

    listening = listen_on_port(host, port)
    say(f"http://{host_in_url(host)}:{listening.getsockname()[1]}/metrics, until Ctrl-C")
    jobs = exposition.Exposition(where)
    serve_app(exposition.metrics_app(jobs, token), listening)
    return EXIT_DONE


def token_of(host: str, token_file: Path | None) -> str:
    if token_file is None:
        if is_loopback(host):
            return ""
        raise UsageError(
            f"on {host} anybody in the network could read the metrics",
            "put a long random word into a file and add --token-file FILE; in Prometheus:"
            " authorization: {credentials_file: FILE}",
        )
    try:
        token = token_file.read_text(encoding="ascii")[:LONGEST_TOKEN].strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise UsageError(f"{token_file} cannot be read: {reason}") from error
    if not token:
        raise UsageError(f"{token_file} is empty", "put a long random word into it")
    return token


# -- passing on -------------------------------------------------------------------------------


# How far each file has been sent, by kind of metrics and tracker.
KEPT = ".tracked_{}_{}"
REACHED, FILES = "reached", "files"
LARGEST_BYTES = 1 << 20
# The progress in a file is saved after every piece of this size.
PIECE_BYTES = 1 << 16
# The limit of values in one line.
MOST_VALUES = 200
NO_CURVE = ("time", "rank", "step", "steps", "left_s")


class Value(NamedTuple):
    """The values of one step, with the time."""

    values: Mapping[str, float]
    step: int
    moment: float


class PassingOn:
    """One kind of metrics of one experiment, sent to one tracker."""

    def __init__(
        self, experiment: Experiment, record: JobRecord, kind: str, name: str, options: Any
    ) -> None:
        self.experiment, self.kind, self.name = experiment, kind, name
        self.path = experiment.path / KEPT.format(kind, name)
        kept = read_kept(self.path)
        # The last step sent of each file.
        self.reached: dict[str, int] = kept.get(REACHED, {})
        self.files = {name: self.file(name, *at) for name, at in kept.get(FILES, {}).items()}
        self.sent = 0
        curves = Curves(
            f"{kind}-{record.job}",
            f"{experiment.name} ({kind})",
            0,
            self.outputs / "tracked",
            beside=True,
            axis="seconds" if kind == "nodes" else "",
        )
        self.tracker = open_tracker(name, curves, options)

    @property
    def outputs(self) -> Path:
        return self.experiment.path / "outputs"

    def pass_on(self, record: JobRecord) -> None:
        """Send what is new, and save the progress."""
        sent = self.sent
        for value in KINDS[self.kind](self, record):
            if value is not None:
                self.tracker.log(*value)
                self.sent += 1
            elif self.sent > sent:
                self.keep()

    def lines(self, name: str) -> Iterator[Line | None]:
        """Yield the new lines of a file, and None after each piece of it."""
        added = self.files.setdefault(name, self.file(name))
        while lines := added.read():
            yield from lines
            yield None

    def file(self, name: str, at: int = 0, mark: int | None = None) -> GrowingFile:
        return GrowingFile(self.outputs / name, at, PIECE_BYTES, mark)

    def keep(self) -> None:
        """Save how far the tracker has received each file."""
        read = {name: (added.at, added.mark) for name, added in self.files.items() if added.at}
        try:
            text = json.dumps({FILES: read, REACHED: self.reached})
            self.experiment.write(self.path.name, text)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}") from error

    def steps(self, record: JobRecord, name: str) -> Iterator[Value | None]:
        """Yield the metrics of a rank; steps that a later attempt repeats are sent once."""
        for line in self.lines(name):
            if line is None:
                yield None
                continue
            point = trainers.Point(line)
            step, moment = point.step, point.number("time")
            if step is None or moment is None or step < self.reached.get(name, -1):
                continue
            self.reached[name] = step
            values = point.numbers(MOST_VALUES, NO_CURVE)
            yield Value(values, step, head_time(record, moment))


def read_kept(path: Path) -> dict[str, Any]:
    try:
        with open_plain(path) as file:
            data = json.loads(file.read(LARGEST_BYTES))
        return {
            FILES: {name: (int(at), int(mark)) for name, (at, mark) in data[FILES].items()},
            REACHED: {name: int(step) for name, step in data[REACHED].items()},
        }
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


# -- the kinds of numbers -------------------------------------------------------------------------


def of_rank_0(passing: PassingOn, record: JobRecord) -> Iterator[Value | None]:
    """Yield the metrics of rank 0, else those read from its output."""
    name = trainers.file_name(0)
    if not trainers.list_metrics_files(passing.outputs):
        name = f"../{trainers.printed_metrics_directory(passing.outputs).name}/{name}"
    yield from passing.steps(record, name)


def of_nodes(passing: PassingOn, record: JobRecord) -> Iterator[Value | None]:
    """Yield the samples of each node; their steps are seconds since the start."""
    for node, paths in samples.list_sample_files(passing.outputs).items():
        for path in paths:
            host = samples.read_machine(path).host or f"node {node}"
            for line in passing.lines(path.name):
                sample = line and samples.sample_of(line)
                if line is None:
                    yield None
                elif sample and (found := {f"node/{host}/{n}": v for n, v in numbers_of(sample)}):
                    moment = head_time(record, sample.time, node)
                    yield Value(found, max(0, int(moment - record.started)), moment)


# The reader of new values of each kind of metrics.
KINDS: dict[str, Callable[[PassingOn, JobRecord], Iterator[Value | None]]] = {
    "training": of_rank_0,
    "nodes": of_nodes,
}


def numbers_of(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield the names and known values of a sample."""
    for name in ("cpu", "iowait", "load", "memory", "swap", "disk_read", "disk_write"):
        value = getattr(sample, name)
        if value is not None:
            yield name, value
    for interface, (received, sent) in sample.net.items():
        yield f"net/{interface}/received", received
        yield f"net/{interface}/sent", sent
    for mount, (free, size) in sample.disks.items():
        if size:
            # Without the root's slash, as the name must not have an empty part.
            yield f"disk{mount.rstrip('/')}/used", 1 - free / size
    for name, values in sample.gpus.items():
        for gpu, value in enumerate(values):
            if value is not None:
                yield f"gpu/{gpu}/{name}", value
