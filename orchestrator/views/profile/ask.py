"""Ask the ranks of a running job for a profile, wait for it, and bring the traces here.

The wish goes to the node of rank 0 alone; the training passes it on, so that all ranks trace the
same steps. Then every node is asked for its traces, and what its clock says.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.common import files
from orchestrator.common.errors import CheckFailed, JobFailed, NodeError, OrchestratorError
from orchestrator.common.folder import Folder
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import for_now
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.clock_offset import Clock
from orchestrator.head.outputs.fetch import Fetch, plain
from orchestrator.head.screen.progress import Progress
from orchestrator.protocol import profiling
from orchestrator.protocol.profiling import ProfileNews, ProfileWish
from orchestrator.protocol.requests.follow import AskProfile, ProfileState
from orchestrator.protocol.requests.request import Beat
from orchestrator.protocol.requests.transfer import Outputs
from orchestrator.records.experiment import JobRecord, NodeRecord
from orchestrator.views.profile.found import CLOCKS

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
    channel: NodeChannel, record: JobRecord, steps: int, patience: float, say: Callable[[str], None]
) -> ProfileNews:
    """Have all ranks trace some steps; return where the traces are."""
    node, unseen = first_node(record.nodes), UNSEEN
    if time.time() - record.started > OLD:
        unseen = UNSEEN_OLD
    wish = ProfileWish(id=secrets.token_hex(8), steps=steps)
    request = AskProfile(job=record.job, node=node.index, wish=wish)
    began, told = time.monotonic(), ""
    while True:
        state = channel.ask(request, ANSWER_SECONDS)
        news, waited = state.news, time.monotonic() - began
        if news is not None and news.state == profiling.WRITTEN:
            return news
        if news is not None and news.state == profiling.FAILED:
            raise JobFailed(f"there is no profile: {news.text}", "orchestrator profile, once more")
        refuse(state, waited, min(unseen, patience), patience)
        line = progress_of(state)
        if line != told:
            say(line)
            told = line
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
                replace=True,
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
            f"node {node.index} ({node.name}): {path}: {why}" for path, why in failed.items()
        ]
    directory = outputs / news.directory
    keep_clocks(directory, clocks)
    return Asked(directory, news, (*lacking, *([news.text] if news.text else [])))


def clock_of(channel: NodeChannel) -> Clock:
    clock = Clock()
    for _ in range(READINGS):
        sent = time.time()
        answer = channel.ask(Beat(), ANSWER_SECONDS)
        clock.heard(sent, answer.time, time.time())
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
