"""`orchestrator profile`: what the steps of a job go into, rank by rank, and what to change."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.common import files
from orchestrator.common.errors import (
    EXIT_DONE,
    CheckFailed,
    JobFailed,
    NodeError,
    OrchestratorError,
    UsageError,
)
from orchestrator.common.folder import Folder
from orchestrator.common.text import Say, plural, size
from orchestrator.config.launch import Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import for_now
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.clock import Clock
from orchestrator.head.schedulers.backend import backend_of
from orchestrator.head.screen import output
from orchestrator.head.screen.progress import Progress
from orchestrator.head.status.find_job import find_experiment
from orchestrator.head.transfer.fetch.fetch import Fetch, plain
from orchestrator.protocol import profiling
from orchestrator.protocol.profiling import ProfileNews, ProfileWish
from orchestrator.protocol.requests.follow import AskProfile, ProfileState
from orchestrator.protocol.requests.request import Beat
from orchestrator.protocol.requests.transfer import Outputs
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.views.profile import found, merged, telling
from orchestrator.views.profile.found import CLOCKS
from orchestrator.views.profile.telling import Reading

LAUNCH = "profile a new run: --set profiling.enabled=true, or orchestrator profile while it trains"


@dataclass(frozen=True)
class ProfileOptions:
    """The options of `orchestrator profile`, as they were typed."""

    steps: int = 3
    timeout: float = 180.0


def profile(where: Where, wanted: str | None, options: ProfileOptions) -> int:
    """Ask a running job, or read the traces that are there; say what they say."""
    say = (lambda _: None) if output.as_json() else output.say
    experiment = find_experiment(where, wanted)
    if experiment is None and wanted is not None and found.paths_in(Path(wanted)):
        directory = Path(wanted)
    else:
        if experiment is None:
            raise experiments.missing(where.experiments, wanted)
        directory = of_experiment(experiment, where, options, say)
    reading = read(directory, options)
    written = write(reading, options)
    if output.as_json():
        output.write_out(json.dumps(telling.as_data(reading, written), indent=1))
        return EXIT_DONE
    output.write_out(telling.in_words(reading, output.terminal()))
    output.write_out("")
    for what, path in written.items():
        output.write_out(f"{what}: {path} ({size(Path(path).stat().st_size)})")
    return EXIT_DONE


def of_experiment(experiment: Experiment, where: Where, options: ProfileOptions, say: Say) -> Path:
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
    say: Say,
) -> Path:
    """Have all ranks trace the same steps, and fetch what they wrote."""
    experiment.check_launched(record)
    transport = backend_of(record).transport(record, where.ssh_config, where.connect_timeout)
    first = first_node(record.nodes)
    say(f"asking rank 0 on {first.name} for {plural(options.steps, 'step')} of {experiment.name}")
    with for_now(transport, first) as channel:
        news = wait_for_traces(channel, record, options.steps, options.timeout, say)
    progress = showing("fetching traces", options)
    asked = fetch(transport, record, news, experiment.path / "outputs", progress)
    for reason in asked.lacking:
        output.complain(f"WARNING: no trace: {output.printable(reason)}")
    return asked.directory


def showing(what: str, options: ProfileOptions, count: int = 0) -> Progress:
    return Progress(what, count, quiet=output.as_json())


def read(directory: Path, options: ProfileOptions) -> Reading:
    paths = found.paths_in(directory)
    if not paths:
        raise UsageError(f"no trace came to {directory}")
    progress = showing("reading traces", options, sum(path.stat().st_size for path in paths))
    try:
        traces = found.read(paths, progress.add)
    finally:
        progress.clear()
    return telling.read(directory, traces, kept_clocks(directory))


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
        files.replace(drawing, telling.draw(reading.overlap, reading.label, title))
        left_out = merged.write(reading.traces, reading.clocks, everything, progress.add)
    except OSError as error:
        output.complain(f"WARNING: {reading.directory} cannot be written: {error.strerror}")
        return {}
    finally:
        progress.clear()
    if left_out:
        output.complain(f"{everything.name} lacks the {left_out:,} shortest operations")
    return {"picture": str(drawing), "all ranks, for ui.perfetto.dev": str(everything)}


# -- ask ----------------------------------------------------------------------------------------
# Ask the ranks of a running job for a profile, wait for it, and bring the traces here.

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 60.0
READINGS = 8  # of each node's clock; the one with the shortest round trip counts
# Seconds without a step of anybody, after which a script is taken for a foreign one: soon after the
# start of the job, and when it has run for so long that it would have come to train().
UNSEEN, UNSEEN_OLD, OLD = 30.0, 3.0, 600.0
FOREIGN = """\
a script without the Trainer traces itself. Add before its loop, the last line inside:
    import os, torch.profiler as tp
    where = os.environ["ORCHESTRATOR_EXPERIMENT"] + "/outputs/profile"
    name = f"{where}/rank_{int(os.environ['RANK']):02d}.json.gz"
    os.makedirs(where, exist_ok=True)
    trace = tp.profile(schedule=tp.schedule(wait=5, warmup=1, active=3, repeat=1),
                       on_trace_ready=lambda done: done.export_chrome_trace(name))
    trace.start()
    trace.step()  # after each training step
  and when it is over, or fetched by orchestrator pull: orchestrator profile"""


@dataclass(frozen=True)
class Asked:
    """The traces that came."""

    directory: Path
    news: ProfileNews
    lacking: tuple[str, ...]  # why some did not


def wait_for_traces(
    channel: NodeChannel, record: JobRecord, steps: int, patience: float, say: Say
) -> ProfileNews:
    """Have all ranks trace some steps; return where the traces are."""
    node, unseen = first_node(record.nodes), UNSEEN
    if time.time() - record.started > OLD:
        unseen = UNSEEN_OLD
    profile = ProfileWish(id=secrets.token_hex(8), steps=steps)
    request = AskProfile(job=record.job, node=node.index, wish=profile)
    began, last_line = time.monotonic(), ""
    while True:
        state = channel.ask(request, ANSWER_SECONDS)
        news, waited = state.news, time.monotonic() - began
        if news is not None and news.state == profiling.WRITTEN:
            return news
        if news is not None and news.state == profiling.FAILED:
            raise JobFailed(f"there is no profile: {news.text}", "orchestrator profile, once more")
        refuse(state, waited, min(unseen, patience), patience)
        line = progress_of(state)
        if line != last_line:
            say(line)
            last_line = line
        time.sleep(LOOK_SECONDS)


def progress_of(state: ProfileState) -> str:
    if state.news is not None and state.news.state == profiling.TRACING:
        return f"all ranks trace steps {state.news.first} to {state.news.last}"
    if state.busy:
        return "waiting for another profile of this job"
    if state.stepped is None:
        return "waiting for the first step of the training"
    return "waiting for the end of a step"


def refuse(state: ProfileState, waited: float, unseen: float, patience: float) -> None:
    """Give up where nothing will come."""
    if state.over:
        raise JobFailed("the job ended before its profile was written")
    if state.stepped is None and waited > unseen:
        raise CheckFailed(
            f"in {waited:.0f} s no rank of this job has made a step with the Trainer: its script"
            " does not use the Trainer, or has not come to train() yet",
            FOREIGN,
        )
    if waited > patience:
        last = "" if state.stepped is None else f"; its last step was {state.stepped:.0f} s ago"
        raise JobFailed(
            f"no profile came within {patience:.0f} s ({progress_of(state)}{last})",
            "a step that takes longer needs more time: --timeout SECONDS",
        )


def fetch(
    transport: Transport, record: JobRecord, news: ProfileNews, outputs: Path, progress: Progress
) -> Asked:
    """Bring the traces of all nodes here, and note what their clocks say."""
    if not plain(news.directory) or PurePosixPath(news.directory).parts[0] != "profile":
        raise NodeError(f"the node broke the protocol: traces in {news.directory!r}")
    folder = Folder(outputs, private=True)

    def of_node(node: NodeRecord) -> tuple[Clock, dict[str, str]]:
        with for_now(transport, node) as channel:
            clock = clock_of(channel)
            request = Outputs(job=record.job, node=node.index)
            listing = channel.ask(request, ANSWER_SECONDS)
            wanted = [file for file in listing.files if file.path.startswith(f"{news.directory}/")]
            with progress.lock:
                progress.size += sum(file.size for file in wanted)
            label = f"node{node.index}"
            result = Fetch(
                *(channel, listing.place, folder),
                label=label,
                replace=lambda _: True,
                progress=progress.add,
            ).go(wanted)
            return clock, result.failed

    answers = fleet.everywhere(record.nodes, of_node)
    progress.clear()
    lacking, clocks = [], {}
    for node, answer in zip(record.nodes, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            lacking.append(f"node {node.index} ({node.name}): {answer.what}")
            continue
        clock, failed = answer
        clocks[str(node.index)] = {"ahead_s": clock.offset, "error_s": clock.error}
        lacking += [
            f"node {node.index} ({node.name}): {path}: {reason}" for path, reason in failed.items()
        ]
    directory = outputs / news.directory
    keep_clocks(directory, clocks)
    return Asked(directory, news, (*lacking, *([news.text] if news.text else [])))


def clock_of(channel: NodeChannel) -> Clock:
    clock = Clock()
    for _ in range(READINGS):
        sent = time.monotonic()
        answer = channel.ask(Beat(), ANSWER_SECONDS)
        clock.heard(sent, answer.time)
    return clock


def keep_clocks(directory: Path, clocks: dict[str, dict[str, float]]) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.replace(directory / CLOCKS, json.dumps(clocks, indent=1) + "\n")


def kept_clocks(directory: Path) -> dict[int, tuple[float, float]]:
    """Return what the head measured when the traces were written, by node."""
    try:
        data = json.loads((directory / CLOCKS).read_text(encoding="ascii"))
        return {int(n): (float(c["ahead_s"]), float(c["error_s"])) for n, c in data.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def first_node(nodes: Sequence[NodeRecord]) -> NodeRecord:
    return min(nodes, key=lambda node: node.first_rank)
