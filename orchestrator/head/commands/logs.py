"""`orchestrator logs`: show the logs of a job, running or over."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common import files, hiding
from orchestrator.common.errors import EXIT_DONE, EXIT_NODE, OrchestratorError
from orchestrator.config.launch import View, Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_node
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.follow.streams.updates import Failed, NodeUpdate, Over
from orchestrator.head.schedulers.backend import SshBackend
from orchestrator.head.screen import failures, output
from orchestrator.head.screen.log_reader import tail_lines
from orchestrator.head.start.job import make_screen
from orchestrator.head.status import status
from orchestrator.head.status.status import find_job
from orchestrator.protocol.requests.follow import AskSystem, SystemLines
from orchestrator.protocol.timing import ANSWER_SECONDS, CATCH_UP_SECONDS, SCHEDULER_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord


def show_logs(
    where: Where, wanted: str | None, view: View, *, follow: bool, last: int | None
) -> int:
    job = find_job(where, wanted)
    record = job.backend.begun(job.experiment, job.record, wait=follow)
    record.check_choice(view.node, view.rank, "--{} {}")
    screen = make_screen(job.experiment, record, view)
    fetcher = LogFetcher(job.experiment, record, job.transport, job.backend)
    over = not follow
    if not record.over and (over or last is not None):
        fetcher.catch_up()
    elif not record.over:
        fetcher.begin()
    if last is not None:
        screen.begin_near_end(last)
    while screen.pump() or not (over or screen.broken):
        over = over or fetcher.over(wait=0.2)
    screen.close()
    if not any(
        tail_lines(log, 1, view.rank)
        for log in log_files(job.experiment, record.nodes)
        if view.node in (None, log.node)
    ):
        output.complain("nothing was printed")
    fetcher.end()
    return EXIT_DONE


# -- catch up -----------------------------------------------------------------------------------
# Fetches the logs of a job for an onlooker, unless a head does so already.


class LogFetcher:
    """Fetches the logs, unless the job is over or a head fills the files."""

    def __init__(
        self, experiment: Experiment, record: JobRecord, ssh: Transport, backend: SshBackend
    ) -> None:
        self.experiment = experiment
        self.record = record
        self.ssh = ssh
        self.backend = backend
        self.inbox: queue.SimpleQueue[NodeUpdate] = queue.SimpleQueue()
        self.followers: list[NodeFollower] = []
        self.finished: set[int] = set()
        self.next_ask = time.monotonic() + SCHEDULER_SECONDS

    def begin(self) -> None:
        if self.record.head_elsewhere or self.experiment.lock() is not None:
            return
        self.followers = [
            NodeFollower(
                self.ssh,
                self.record,
                node,
                self.experiment,
                self.inbox.put,
            )
            for node in self.record.nodes
        ]
        for follower in self.followers:
            follower.start()

    def over(self, wait: float) -> bool:
        """Wait for the next event; return True once no further lines will come."""
        if self.followers and self.experiment.successor() is not None:
            # A new head is about to take the lock and fetch the logs.
            self.end()
        if not self.followers:
            time.sleep(0 if self.record.over else wait)
            self.record = self.experiment.read_record()
            if time.monotonic() >= self.next_ask:
                self.next_ask = time.monotonic() + SCHEDULER_SECONDS
                self.record = self.backend.settle(self.experiment, self.record)
            return self.record.over
        try:
            updates = self.inbox.get(timeout=wait)
        except queue.Empty:
            return False
        if isinstance(updates, Failed):
            raise updates.error
        if isinstance(updates, Over):
            self.finished.add(updates.node)
        return len(self.finished) == len(self.followers)

    def catch_up(self) -> None:
        """Wait until the files here hold what the nodes had when asked."""
        if self.record.head_elsewhere:
            return
        states = status.ask_nodes(self.ssh, self.record)
        self.begin()
        deadline = time.monotonic() + CATCH_UP_SECONDS
        wanted = [
            (follower, state.log_bytes)
            for follower, state in zip(self.followers, states, strict=False)
            if state.log_bytes is not None
        ]
        while any(follower.text.size < size for follower, size in wanted):
            if self.over(wait=0.2) or time.monotonic() > deadline:
                break

    def end(self) -> None:
        for follower in self.followers:
            follower.close()
        self.followers = []
        self.experiment.unlock()


# -- --system: the lines of a job's own supervisors and servers ------------------------------------

# A node's lines from this long before and after the job are shown as well.
MARGIN_SECONDS = 120.0
SYSTEM = "system"


def show_system(where: Where, wanted: str | None, node: int | None, last: int | None) -> int:
    """Fetch the lines of all nodes, or of one, and show them below those of the head."""
    job = find_job(where, wanted)
    record, experiment = job.record, job.experiment
    record.check_choice(node, None, "--{} {}")
    nodes = [one for one in record.nodes if node in (None, one.index)]

    def fetch(one: NodeRecord) -> None:
        keep(experiment, one, ask_node(job.transport, one, question(record, one), ANSWER_SECONDS))

    answers = fleet.map_parallel(nodes, fetch)
    if node is None:
        show_files("head", [Path(f"{experiment.head_log}.1"), experiment.head_log], last)
    for one, answer in zip(nodes, answers, strict=True):
        who = f"node {one.index} ({one.name})"
        if isinstance(answer, OrchestratorError):
            output.complain(f"orchestrator: {who} cannot be asked: {answer}")
        for kind in ("supervisor", "server"):
            show_files(f"{who}, {kind}", [system_file(experiment, one, kind)], last)
    return EXIT_NODE if failures.failed_nodes(nodes, answers) else EXIT_DONE


def question(record: JobRecord, node: NodeRecord) -> AskSystem:
    """Return the request for a node's system log, of all attempts."""
    now = time.time()
    return AskSystem(
        job=record.job,
        part=node.part,
        since=now - record.started + MARGIN_SECONDS,
        until=now - (record.ended or now) - MARGIN_SECONDS,
    )


def system_file(experiment: Experiment, node: NodeRecord, kind: str) -> Path:
    return experiment.logs / SYSTEM / f"{experiment.log(node).stem}_{kind}.txt"


def keep(experiment: Experiment, node: NodeRecord, lines: SystemLines) -> None:
    """Replace the system log of a node in the experiment with these lines."""
    directory = experiment.logs / SYSTEM
    with contextlib.suppress(FileExistsError):
        files.make_private(directory)
    for kind, text in (("supervisor", lines.supervisor), ("server", lines.server)):
        # An empty answer, such as from a node that was pruned, must not erase the lines kept here.
        if text:
            files.replace_file(system_file(experiment, node, kind), hiding.redacted_text(text))


def show_files(title: str, paths: Sequence[Path], last: int | None) -> None:
    """Print some files as one below a title, or their last lines."""
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            lines += files.read_plain(path).decode("utf-8", "replace").splitlines()
    shown = lines if last is None else lines[len(lines) - min(last, len(lines)) :]
    output.write_out(
        "\n".join([f"== {title}", *map(output.printable_text, shown or ["(no lines)"])])
    )
