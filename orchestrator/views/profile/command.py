"""`orchestrator profile`: what the steps of a job go into, rank by rank, and what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.common.text import plural, size
from orchestrator.config.launch import Where
from orchestrator.head.connect.reach import for_now
from orchestrator.head.screen import output
from orchestrator.head.screen.progress import Progress
from orchestrator.head.status.backend import backend_of
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.views.profile import ask, found, merged, picture, telling
from orchestrator.views.profile.telling import Reading

LAUNCH = "profile a new run: --set profiling.enabled=true, or orchestrator profile while it trains"


@dataclass(frozen=True)
class ProfileOptions:
    """The options of `orchestrator profile`, as they were typed."""

    steps: int = 3
    timeout: float = 180.0
    as_json: bool = False


def profile(where: Where, wanted: str | None, options: ProfileOptions) -> int:
    """Ask a running job, or read the traces that are there; say what they say."""
    say = (lambda _: None) if options.as_json else output.say
    experiment = experiments.find(where.experiments, wanted, trusted=where.trust_record)
    if experiment is None and wanted is not None and found.paths_in(Path(wanted)):
        directory = Path(wanted)
    else:
        if experiment is None:
            raise experiments.missing(where.experiments, wanted)
        directory = of_experiment(experiment, where, options, say)
    reading = read(directory, options)
    written = write(reading, options)
    if options.as_json:
        output.tell(json.dumps(telling.as_data(reading, written), indent=1))
        return EXIT_DONE
    output.tell(telling.in_words(reading, output.look()))
    output.tell("")
    for what, path in written.items():
        output.tell(f"{what}: {path} ({size(Path(path).stat().st_size)})")
    return EXIT_DONE


def of_experiment(
    experiment: Experiment, where: Where, options: ProfileOptions, say: Callable[[str], None]
) -> Path:
    """Return the directory with the traces: new ones of a running job, the newest of another."""
    record = experiment.read_record()
    if record.state in ("queued", "starting", "restarting"):
        raise UsageError(
            f"{experiment.name} is {record.state}: there are no ranks to ask yet",
            f"later: orchestrator profile {experiment.name}",
        )
    if not record.over:
        return of_running(experiment, record, where, options, say)
    directory = found.newest(experiment.path / "outputs" / "profile")
    if directory is None:
        raise UsageError(f"{experiment.name} is over, and none of its ranks left a trace", LAUNCH)
    say(f"{experiment.name} is over: reading its traces in {directory}")
    return directory


def of_running(
    experiment: Experiment,
    record: JobRecord,
    where: Where,
    options: ProfileOptions,
    say: Callable[[str], None],
) -> Path:
    """Have all ranks trace the same steps, and fetch what they wrote."""
    experiment.check_launched(record)
    transport = backend_of(record).transport(record, where.ssh_config)
    first = ask.first_node(record.nodes)
    say(f"asking rank 0 on {first.name} for {plural(options.steps, 'step')} of {experiment.name}")
    with for_now(transport, first) as channel:
        news = ask.wait_for_traces(channel, record, options.steps, options.timeout, say)
    progress = showing("fetching traces", options)
    asked = ask.fetch(transport, record, news, experiment.path / "outputs", progress)
    for why in asked.lacking:
        output.complain(f"WARNING: no trace: {output.printable(why)}")
    return asked.directory


def showing(what: str, options: ProfileOptions, count: int = 0) -> Progress:
    progress = Progress(what, count)
    progress.tty = progress.tty and not options.as_json
    return progress


def read(directory: Path, options: ProfileOptions) -> Reading:
    paths = found.paths_in(directory)
    if not paths:
        raise UsageError(f"no trace came to {directory}")
    progress = showing("reading traces", options, sum(path.stat().st_size for path in paths))
    try:
        traces = found.read(paths, progress.add)
    finally:
        progress.clear()
    return telling.read(directory, traces, ask.kept_clocks(directory))


def write(reading: Reading, options: ProfileOptions) -> dict[str, str]:
    """Write the picture and the trace of all ranks beside the traces; return where they are."""
    drawing, everything = reading.directory / found.PICTURE, reading.directory / found.MERGED
    name = reading.directory.absolute()
    while name.name in ("profile", "outputs") or name.name.startswith("step_"):
        name = name.parent
    title = f"{name.name}: {reading.which}, by rank"
    progress = showing("writing one trace of all ranks", options)
    progress.size = sum(trace.path.stat().st_size for trace in reading.traces)
    try:
        files.replace(drawing, picture.draw(reading.overlap, reading.label, title))
        left_out = merged.write(reading.traces, reading.clocks, everything, progress.add)
    except OSError as error:
        output.complain(f"WARNING: {reading.directory} cannot be written: {error.strerror}")
        return {}
    finally:
        progress.clear()
    if left_out:
        output.complain(f"{everything.name} lacks the {left_out:,} shortest operations")
    return {"picture": str(drawing), "all ranks, for ui.perfetto.dev": str(everything)}
