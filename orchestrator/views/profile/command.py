"""`orchestrator profile`: where the time of a job's steps goes, rank by rank."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.common.errors import (
    EXIT_DONE,
    CheckFailed,
    JobFailed,
    NodeError,
    OrchestratorError,
    UsageError,
)
from orchestrator.common.folder import Folder
from orchestrator.common.text import plural
from orchestrator.config.launch import Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import temporary_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.schedulers.backend import backend_of
from orchestrator.head.screen import output
from orchestrator.head.screen.events import say
from orchestrator.head.screen.lines import clean_line
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.status.status import find_experiment
from orchestrator.head.transfer.fetch import Fetch, is_plain_path
from orchestrator.protocol.requests import follow as profiling
from orchestrator.protocol.requests.follow import (
    AskProfile,
    ProfileAnswer,
    ProfileRequest,
    ProfileState,
)
from orchestrator.protocol.requests.transfer import Outputs
from orchestrator.protocol.timing import ANSWER_SECONDS
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.traces import timeline
from orchestrator.traces.timeline import TracedRank, events_that_matter, trace_of_rank

LAUNCH = "profile a new run: --set profiling.enabled=true, or orchestrator profile while it trains"


def profile(where: Where, wanted: str | None, steps: int, timeout: float) -> int:
    """Print a summary of traces: new ones of a running job, else those that exist."""
    experiment = find_experiment(where, wanted)
    if experiment is None and wanted is not None and paths_in(Path(wanted)):
        directory = Path(wanted)
    elif experiment is None:
        raise experiments.missing_experiment(where, wanted)
    else:
        directory = of_experiment(experiment, where, steps, timeout)
    paths = paths_in(directory)
    if not paths:
        raise UsageError(f"no trace came to {directory}")
    with ProgressBar("reading traces", sum(path.stat().st_size for path in paths)) as progress:
        traces = read_traces(paths, progress.add)
    together = timeline.compare_ranks({trace.number: trace.rank for trace in traces})
    data = {"directory": str(directory), **timeline.overlap_as_data(together)}
    words = timeline.overlap_to_text(together, {trace.number: trace.host for trace in traces})
    output.print_result(data, lambda _: f"{words}\neach rank, for ui.perfetto.dev: {directory}")
    return EXIT_DONE


def of_experiment(experiment: Experiment, where: Where, steps: int, timeout: float) -> Path:
    """Return the directory with the traces: new ones of a running job, the newest of another."""
    record = experiment.read_record()
    if record.state in ("queued", "starting", "restarting"):
        raise UsageError(
            f"{experiment.name} is {record.state}: there are no ranks to ask yet",
            f"later: orchestrator profile {experiment.name}",
        )
    if not record.over:
        return of_running(experiment, record, where, steps, timeout)
    directory = newest_traces(experiment.path / "outputs" / "profile")
    if directory is None:
        raise UsageError(f"{experiment.name} is over, and none of its ranks left a trace", LAUNCH)
    say(f"{experiment.name} is over: reading its traces in {directory}")
    return directory


def of_running(
    experiment: Experiment, record: JobRecord, where: Where, steps: int, timeout: float
) -> Path:
    """Trace the same steps on all ranks, and return the directory of the fetched traces."""
    experiment.check_launched(record)
    transport = backend_of(record).transport(record, where.ssh_config, where.connect_timeout)
    first = min(record.nodes, key=lambda node: node.first_rank)
    say(f"asking rank 0 on {first.name} for {plural(steps, 'step')} of {experiment.name}")
    with temporary_channel(transport, first) as channel:
        reply = wait_for_traces(channel, record, first.index, steps, timeout)
    lacking = fetch(transport, record, reply, experiment.path / "outputs")
    for reason in lacking:
        output.complain(f"WARNING: no trace: {output.printable_text(reason)}")
    return experiment.path / "outputs" / reply.directory


# -- ask ----------------------------------------------------------------------------------------
# Ask the ranks of a running job for a profile, wait for it, and fetch the traces.

LOOK_SECONDS = 0.5
# If no rank makes a step for this many seconds, the script does not use the Trainer. A job gets
# more of them soon after its start than once it is OLD seconds old.
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


def wait_for_traces(
    channel: NodeChannel, record: JobRecord, node: int, steps: int, patience: float
) -> ProfileAnswer:
    """Trace some steps on all ranks; return where the nodes keep the traces."""
    unseen = UNSEEN_OLD if time.time() - record.started > OLD else UNSEEN
    profile = ProfileRequest(id=secrets.token_hex(8), steps=steps)
    request = AskProfile(
        job=record.job, part=record.node(node).part, attempt=record.attempt, trace=profile
    )
    began, last_line = time.monotonic(), ""
    while True:
        state = channel.ask(request, ANSWER_SECONDS)
        reply, waited = state.reply, time.monotonic() - began
        if reply is not None and reply.state == profiling.WRITTEN:
            return reply
        if reply is not None and reply.state == profiling.FAILED:
            raise JobFailed(f"there is no profile: {reply.text}", "orchestrator profile, once more")
        refuse(state, waited, min(unseen, patience), patience)
        line = progress_of(state)
        if line != last_line:
            say(line)
            last_line = line
        time.sleep(LOOK_SECONDS)


def progress_of(state: ProfileState) -> str:
    if state.reply is not None and state.reply.state == profiling.TRACING:
        return f"all ranks trace steps {state.reply.first} to {state.reply.last}"
    if state.busy:
        return "waiting for another profile of this job"
    if state.stepped is None:
        return "waiting for the first step of the training"
    return "waiting for the end of a step"


def refuse(state: ProfileState, waited: float, unseen: float, patience: float) -> None:
    """Raise an error if no profile can come any more."""
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
    transport: Transport, record: JobRecord, reply: ProfileAnswer, outputs: Path
) -> list[str]:
    """Fetch the traces of all nodes; return why some are missing."""
    if not is_plain_path(reply.directory) or PurePosixPath(reply.directory).parts[0] != "profile":
        raise NodeError(f"the node broke the protocol: traces in {reply.directory!r}")
    folder = Folder(outputs, private=True)

    def of_node(node: NodeRecord) -> dict[str, str]:
        with temporary_channel(transport, node) as channel:
            listing = channel.ask(Outputs(job=record.job, part=node.part), ANSWER_SECONDS)
            wanted = [file for file in listing.files if file.path.startswith(f"{reply.directory}/")]
            with progress.lock:
                progress.size += sum(file.size for file in wanted)
            fetch = Fetch(
                channel,
                listing.place,
                folder,
                label=f"node{node.index}",
                replace=lambda _: True,
                progress=progress.add,
            )
            return fetch.go(wanted).failed

    with ProgressBar("fetching traces") as progress:
        answers = fleet.map_parallel(record.nodes, of_node)
    lacking = [reply.text] if reply.text else []
    for node, answer in zip(record.nodes, answers, strict=True):
        name = f"node {node.index} ({node.name})"
        if isinstance(answer, OrchestratorError):
            lacking.append(f"{name}: {answer.what}")
        else:
            lacking += [f"{name}: {path}: {reason}" for path, reason in answer.items()]
    return lacking


# -- the traces -------------------------------------------------------------------------------


# Files that are no trace of one rank; earlier versions wrote them.
OURS = {"summary.json", "clocks.json", "all_ranks.json.gz"}
MOST_FILES = 4096


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank. Its metadata is not trusted."""

    path: Path
    number: int
    rank: TracedRank
    host: str


def paths_in(directory: Path) -> list[Path]:
    """Return the trace files of a directory."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    traces = [path for path in entries if path.name.endswith((".json", ".json.gz"))]
    named = [path for path in traces if path.name not in OURS and path.name[0] != "."]
    return [path for path in named if path.is_file()][:MOST_FILES]


def newest_traces(profiles: Path) -> Path | None:
    """Return the directory with the newest traces: `profiles` itself or one below it."""
    try:
        below = [path for path in profiles.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return None
    times = {
        directory: max(path.stat().st_mtime for path in paths)
        for directory in [profiles, *below]
        if (paths := paths_in(directory))
    }
    return max(times, key=lambda directory: times[directory], default=None)


def read_traces(
    paths: Sequence[Path], progress: Callable[[int], None] = lambda _: None
) -> list[RankTrace]:
    """Read traces, one per rank, in the order of the ranks."""
    traces: dict[int, RankTrace] = {}
    for index, path in enumerate(paths):
        trace = read_one(path, index)
        if trace.number in traces:
            raise UsageError(
                f"{path} is a second trace of rank {trace.number}, beside"
                f" {traces[trace.number].path.name}",
                "leave the traces of one profile in a directory",
            )
        traces[trace.number] = trace
        progress(path.stat().st_size)
    return [traces[number] for number in sorted(traces)]


def read_one(path: Path, index: int) -> RankTrace:
    with timeline.open_trace(path) as trace:
        rank = trace_of_rank(events_that_matter(trace.events()))
        number = trace.rank
        if number is None:
            named = re.search(r"rank_?(\d+)", path.name)
            number = int(named[1]) if named else index
        host = trace.about.get("host")
        shown = (
            clean_line(host.encode(errors="replace").decode()[:80]) if isinstance(host, str) else ""
        )
        return RankTrace(path, number, rank, shown)
