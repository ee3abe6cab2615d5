"""Finds a job again, and shows its state as its nodes report it."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from orchestrator.common.errors import EXIT_DONE, EXIT_NODE, OrchestratorError, UsageError
from orchestrator.common.text import format_duration, parse_seconds, plural
from orchestrator.common.wings import import_view
from orchestrator.config.launch import Launch, Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_node
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import verdict
from orchestrator.head.nodes.node_list import Node, indices_in_words
from orchestrator.head.schedulers.backend import UNSCHEDULED, Scheduled, SshBackend, backend_of
from orchestrator.head.screen import output, styles
from orchestrator.head.screen import tracebacks as crash_dump
from orchestrator.head.screen.output import PLAIN, Column, Table, Terminal, clear_screen, complain
from orchestrator.head.screen.progress import SEPARATOR
from orchestrator.protocol.events import RankState
from orchestrator.protocol.message import encode_value
from orchestrator.protocol.requests.follow import AskJobState, JobState
from orchestrator.records import experiments, goodput, manifest
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.metrics import progress

# Ranks in the same state share a line, which names this many processes.
MOST_PIDS = 4


def ask_nodes(ssh: Transport, record: JobRecord) -> list[JobState]:
    """Return the job's state on each of its nodes, with times by our clock."""

    def ask(node: NodeRecord) -> JobState:
        request = AskJobState(job=record.job, part=node.part, attempt=record.attempt)
        return ask_node(ssh, node, request, ssh.timeout)

    return [
        state_of(record, node, "unreachable", answer.what)
        if isinstance(answer, OrchestratorError)
        else answer
        for node, answer in zip(record.nodes, fleet.map_parallel(record.nodes, ask), strict=True)
    ]


def state_of(
    record: JobRecord, node: NodeRecord, state: str, reason: str | None = None
) -> JobState:
    """Return the state of the job on a node that does not tell it."""
    return JobState(job=record.job, part=node.part, state=state, why=reason, ranks={})


def from_record(record: JobRecord) -> list[JobState]:
    """Return the state of the job on each node when it ended."""
    return [
        state_of(record, node, node.state).replace(ranks=node.ranks, agent=node.exit_code)
        for node in record.nodes
    ]


def job_now(experiment: Experiment, record: JobRecord, states: Sequence[JobState]) -> str:
    if not record.over and states and all(state.state == "ended" for state in states):
        return (
            f"ended (its logs and its verdict: orchestrator attach {shlex.quote(experiment.name)})"
        )
    return record.state


@dataclass(frozen=True)
class StatusLine:
    """A node or a rank of a job, and its state there."""

    title: str
    # The node's name, or the process of the rank.
    place: str
    state: str
    note: str


STATES_THERE: Table[StatusLine] = Table(
    (
        Column("", lambda line: line.title),
        Column("", lambda line: line.place),
        Column("", lambda line: (line.state, styles.STATES.get(line.state, ""))),
        Column("", lambda line: line.note),
    ),
    indent=2,
)


def to_text(
    experiment: Experiment,
    record: JobRecord,
    states: Sequence[JobState],
    scheduled: Scheduled = UNSCHEDULED,
    terminal: Terminal = PLAIN,
) -> str:
    """Return a line for the job and a table of its nodes and ranks."""
    state = job_now(experiment, record, states)
    painted = output.paint_text(state, styles.STATES.get(state, ""), terminal)
    heading = f"{record.job}: {painted}, {plural(len(record.nodes), 'node')}"
    heading += attempt_now(record)
    heading += f", {scheduled.text}" if scheduled.text else ""
    lines = [heading, *how_far(experiment, record)]
    lines.append(STATES_THERE.text(rows_of(record, states), terminal).rstrip())
    if words := goodput.shares_in_words(time_of(experiment, record)):
        lines.append(f"  time spent: {words}")
    if steps := start_times(experiment, record):
        words = ", ".join(f"{step} {took:.2f} s" for step, took in steps.items())
        lines.append(f"  start: {words}")
    lines += [f"  {output.printable_text(slow.text)}" for slow in record.slow]
    lines += [
        f"  {line if terminal.color else output.printable_text(line)}"
        for line in cause_of(experiment, record)
    ]
    return "\n".join(line for line in lines if line).rstrip()


def rows_of(record: JobRecord, states: Sequence[JobState]) -> Iterator[StatusLine]:
    """Yield a line for each node, followed by one for each kind of rank on it."""
    fault = record.verdict.rank if record.over and record.verdict else None
    for node, state in zip(record.nodes, states, strict=True):
        notes = [state.why]
        if state.log_time:
            silence = format_duration(round(max(0.0, time.time() - state.log_time)))
            notes.append(f"last output {silence} ago")
        yield StatusLine(
            f"node {node.index}", node.name, state.state, ", ".join(filter(None, notes))
        )
        for numbers, ranks in alike(state.ranks):
            pids = ["?" if rank.pid is None else str(rank.pid) for rank in ranks]
            shown = ", ".join(pids if len(pids) <= MOST_PIDS else [*pids[: MOST_PIDS - 1], "..."])
            ends = [
                "" if ranks[0].code is None else f"exit code {ranks[0].code}",
                f"rank {fault} was the cause" if fault in numbers else "",
            ]
            yield StatusLine(
                f"  {indices_in_words(numbers, 'rank')}",
                f"pid{'s' * (len(pids) > 1)} {shown}",
                ranks[0].state,
                ", ".join(filter(None, ends)),
            )


def alike(ranks: Mapping[int, RankState]) -> Iterator[tuple[list[int], list[RankState]]]:
    """Yield ranks that follow each other and are in the same state."""

    def kind(place: tuple[int, int]) -> tuple[int, str, int | None]:
        """Return the number less its position, which is the same for consecutive numbers."""
        at, number = place
        return number - at, ranks[number].state, ranks[number].code

    for _, places in groupby(enumerate(sorted(ranks)), kind):
        numbers = [number for _, number in places]
        yield numbers, [ranks[number] for number in numbers]


def progress_of(experiment: Experiment, record: JobRecord) -> progress.Progress:
    return progress.read_progress(experiment.path, record)[0]


def how_far(experiment: Experiment, record: JobRecord) -> list[str]:
    """Return lines with the progress of a job, its duration, and its command."""
    known = progress_of(experiment, record)
    if record.over:
        known = replace(known, rate=None, left=None)
    took = format_duration(round(max(1.0, (record.ended or time.time()) - record.started)))
    age = f"started {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record.started))}"
    words = [*progress.progress_texts(known), f"{'took' if record.over else 'for'} {took}", age]
    command = [Path(word).name if at == 0 else word for at, word in enumerate(record.command)]
    typed = [output.printable_text(f"  {shlex.join(command)}")] if command else []
    return [f"  {SEPARATOR.join(words)}", *typed]


def cause_of(experiment: Experiment, record: JobRecord) -> list[str]:
    """Return the verdict of a job that failed, with the paths that the user knows."""
    if record.verdict is None or record.state not in ("failed", "lost"):
        return []
    tree = manifest.working_tree(experiment)
    rank = "" if record.verdict.rank is None else f" --rank {record.verdict.rank}"
    logs = f"orchestrator logs {shlex.quote(experiment.name)}{rank}"
    shown = crash_dump.own_paths_in_verdict(record.verdict, tree)
    return verdict.verdict_to_lines(shown, logs, styles.style_text)


def attempt_now(record: JobRecord) -> str:
    """Return the number of a restarted job's attempt, and why the previous one ended."""
    earlier = [attempt for attempt in record.attempts if attempt.restarted]
    if not earlier:
        return ""
    most = 1 + record.launch.max_restarts
    return f", attempt {len(earlier) + 1} of at most {most} ({earlier[-1].why})"


def time_of(experiment: Experiment, record: JobRecord) -> dict[str, float]:
    """Return what a job's time went into, or has gone into so far."""
    if record.goodput or record.over:
        return record.goodput
    return goodput.goodput_seconds(record, experiment.path, time.time())


# A step of a start -> the moment of the manifest's timeline at which it ends.
STEPS = {"connect": "reached", "code": "synced", "plan": "planned", "check": "checked"}


def start_times(experiment: Experiment, record: JobRecord) -> dict[str, float]:
    """Return the seconds of each step of a job's first start; empty where they are not known."""
    ranks = [node.times.get("ranks", 0.0) for node in record.nodes]
    if record.attempt > 1 or not all(ranks):
        return {}
    try:
        timeline = manifest.read_manifest(experiment)["timeline"]
        moments = [float(timeline[name]) for name in ("begin", *STEPS.values())]
    except (UsageError, LookupError, TypeError, ValueError):
        return {}
    # The clocks of two machines may differ.
    took = [max(0.0, end - begin) for begin, end in pairwise((*moments, max(ranks)))]
    return dict(zip((*STEPS, "ranks"), took, strict=True))


def to_json(
    experiment: Experiment, record: JobRecord, states: Sequence[JobState], scheduled: Scheduled
) -> dict[str, Any]:
    nodes = [
        {
            **{
                "index": node.index,
                "node": node.index,
                "name": node.name,
                "address": node.address,
                **encode_value(state),
            },
            "agent": state.agent,
        }
        for node, state in zip(record.nodes, states, strict=True)
    ]
    return {
        "job": record.job,
        "experiment": record.experiment,
        "state": job_now(experiment, record, states),
        "command": record.command,
        "started": record.started,
        "ended": record.ended,
        "progress": encode_value(progress_of(experiment, record)),
        "exit_code": record.exit_code,
        "verdict": encode_value(record.verdict),
        "slow": encode_value(record.slow),
        "attempts": encode_value(record.attempts),
        "goodput": time_of(experiment, record),
        "start": start_times(experiment, record),
        "nodes": nodes,
        **scheduled.data,
    }


def lives(state: JobState) -> bool:
    return state.state == "running" or bool(state.processes)


# -- which job is meant ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundJob:
    """A job, its experiment's directory, and how its nodes are reached."""

    record: JobRecord
    transport: Transport
    backend: SshBackend
    experiment: Experiment

    def refreshed(self) -> FoundJob:
        """Return the job with a fresh record; a job that ended without its head is concluded."""
        record = self.backend.settle(self.experiment, self.experiment.read_record())
        return replace(self, record=record)


def find_job(where: Where, wanted: str | None) -> FoundJob:
    experiment = find_experiment(where, wanted)
    if wanted is None and not where.trust_record:
        report_passed_over(where.experiments, experiment)
    if experiment is None:
        raise experiments.missing_experiment(where, wanted)
    record = experiment.read_record()
    # A command on such a record may contact its nodes, so their addresses must be trusted.
    if where.trust_record or not record.over:
        experiment.check_launched(record)
    backend = backend_of(record)
    record = backend.settle(experiment, record)
    transport = backend.transport(record, where.ssh_config, where.connect_timeout)
    return FoundJob(record, transport, backend, experiment)


def transport_without_record(where: Where) -> SshTransport:
    """Return the way to nodes of which nothing but the node list is known."""
    return SshTransport(
        SshConfig(where.ssh_config), timeout=where.connect_timeout or Launch.connect_timeout
    )


def find_experiment(where: Where, wanted: str | None) -> Experiment | None:
    """Find an experiment by its name; without one, the only one that runs, else the newest.

    A record may say for ever that a job runs whose head was killed: then its nodes are asked.
    """
    newest = experiments.find_experiment(where, wanted)
    if wanted is not None or newest is None:
        return newest
    candidates = [
        (each, record)
        for each, record in experiments.unfinished_experiments(where)
        if not record.is_elsewhere and each.is_launched_here(record)
    ]
    if [candidate.path for candidate, _ in candidates] in ([], [newest.path]):
        return newest
    known = [
        (candidate, run_certainty(candidate, record, where)) for candidate, record in candidates
    ]
    most = max(certainty for _, certainty in known)
    running = [candidate for candidate, certainty in known if certainty == most > NOT]
    if len(running) > 1:
        raise several([candidate.name for candidate in running])
    return running[0] if running else newest


def several(names: Sequence[str]) -> UsageError:
    listed = "".join(f"\n  {name}" for name in names)
    return UsageError(f"{len(names)} jobs run:{listed}", f"name one of them, such as {names[-1]}")


NOT, MAYBE, SURELY = range(3)


def run_certainty(experiment: Experiment, record: JobRecord, where: Where) -> int:
    """Return SURELY if a job waits or runs, NOT if it has ended, else MAYBE.

    MAYBE means that some nodes do not answer.
    """
    if experiment.followed:
        return SURELY
    backend = backend_of(record)
    record = backend.settle(experiment, record)
    if record.over or record.state == "queued":
        return NOT if record.over else SURELY
    transport = backend.transport(record, where.ssh_config, where.connect_timeout)
    states = ask_nodes(transport, record)
    if any(lives(state) for state in states):
        return SURELY
    return MAYBE if any(state.state == "unreachable" for state in states) else NOT


def report_passed_over(root: Path, taken: Experiment | None) -> None:
    """Warn if the newest experiment is not the one that is taken.

    One of our own is probably the one that is meant: in its place no other is stopped.
    """
    newer = [
        refused
        for refused in experiments.untrusted_experiments(root)
        if taken is None or refused.path.name[-15:] > taken.name[-15:]
    ]
    for refused in newer:
        if refused.ours:
            raise refused
    if newer:
        more = f" (and {len(newer) - 1} more)" if newer[1:] else ""
        complain(f"orchestrator: {newer[-1]}{more}")


# -- `orchestrator status` -------------------------------------------------------------------------


def status_command(where: Where, wanted: str | None, *, watch: bool) -> int:
    job = find_job(where, wanted)
    running = job.record.state == "running"
    if watch and not output.as_json() and running:
        top = import_view("top")
        if top.can_be_live():
            top.of_job(where, job)
            job, watch = job.refreshed(), False
    while True:
        record = job.record
        asleep = record.over or record.state == "queued"
        states = from_record(record) if asleep else ask_nodes(job.transport, record)
        if watch:
            clear_screen()
        scheduled = job.backend.scheduled(record)
        output.print_result(
            to_json(job.experiment, record, states, scheduled),
            partial(to_text, job.experiment, record, states, scheduled),
        )
        over = record.over or (
            record.state != "queued" and all(state.state == "ended" for state in states)
        )
        if over or not watch:
            unreachable = any(state.state == "unreachable" for state in states)
            return EXIT_NODE if unreachable else EXIT_DONE
        time.sleep(1)
        job = job.refreshed()


# -- containers in which jobs run ------------------------------------------------------------------


def containers_of(
    nodes: Sequence[Node], where: Where, matters: Callable[[JobRecord], bool]
) -> list[Node]:
    """Return these nodes as the launches of such jobs entered them, where the list does not."""
    listed = {(node.host, node.user, node.port): node for node in nodes}
    found: dict[object, Node] = {}
    for experiment in experiments.list_experiments(where):
        record = trusted_record(experiment)
        if record is None or not matters(record):
            continue
        for part in (*record.nodes, *record.spares):
            key = (part.host, part.user, part.port)
            node, wrap = listed.get(key), part.wrap
            if node is not None and wrap not in (None, node.wrap):
                inside = replace(node, python=part.python, activate=part.activate, wrap=wrap)
                found[key, wrap] = inside
    return list(found.values())


def trusted_record(experiment: Experiment) -> JobRecord | None:
    """Return its record, if this login launched it: how a node is entered is a command there."""
    with contextlib.suppress(UsageError):
        record = experiment.read_record()
        if any(part.wrap for part in (*record.nodes, *record.spares)):
            experiment.check_launched(record)
            return record
    return None


def is_open(record: JobRecord) -> bool:
    return not record.over


def may_be_warm(record: JobRecord) -> bool:
    """Return True if a job runs, or may have left warm processes that still wait."""
    warm = record.launch.warm
    if warm is None or record.ended is None:
        return warm is not None
    return record.ended + parse_seconds("launch.warm", warm) > time.time()
