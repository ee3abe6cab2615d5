"""Write the files that describe a launch: job.json, config.yaml and manifest.json."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.common import files, hiding, interrupt
from orchestrator.common.errors import OrchestratorError, StoppedEarly, UsageError
from orchestrator.common.version import __version__
from orchestrator.config import load
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.events import of_launch
from orchestrator.head.follow.streams.node_logs import NodeLogs
from orchestrator.head.plan import redact
from orchestrator.head.plan.model import NodePlan
from orchestrator.head.plan.plan import ENGINE
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.screen.events import tell
from orchestrator.head.screen.log_reader import NO_RANK
from orchestrator.head.start.code import experiments_below
from orchestrator.head.start.parts import Prepared
from orchestrator.head.start.variables import digest_of_hook
from orchestrator.head.transfer import listing
from orchestrator.head.transfer.scan import MEGABYTE
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol import message
from orchestrator.records import experiment
from orchestrator.records.experiment import NOTIFY, Experiment, JobRecord, NodeRecord

# The manifest waits this long for a scan that has not ended when the job has started.
TREE_SECONDS = 1.0


@dataclass(frozen=True)
class Running:
    """A running attempt with open logs; a channel that is None has yet to be opened."""

    experiment: Experiment
    transport: Transport
    record: JobRecord
    channels: Sequence[NodeChannel | None]
    logs: Sequence[NodeLogs]


def first_record(prepared: Prepared) -> JobRecord:
    """Return the record of a job that is about to start; its command line is redacted."""
    request, plan = prepared.request, prepared.plan
    config, target = request.where.ssh_config, request.target
    words = ["-m", target.name] if target.kind == "module" else [target.name]
    return JobRecord(
        job=plan.job,
        experiment=str(prepared.experiment.path),
        state="starting",
        command=shown_command(request, request.command),
        nodes=list(map(node_record, plan.nodes)),
        started=time.time(),
        head=experiment.this_head(),
        ssh_config=str(config.absolute()) if config else None,
        master=f"{plan.master_address}:{plan.master_port}",
        launch=replace(request.config.launch, start=plan.start),
        engine=target.kind == "engine" and target.name in ("", ENGINE),
        program=[] if target.kind == "engine" else shown_command(request, [*words, *target.args]),
    )


def shown_command(request: LaunchRequest, words: Sequence[str]) -> list[str]:
    """Return a command line without secrets: first those known by value, then by pattern."""
    return redact.redacted_command(hiding.hide_secrets(list(words), request.secrets))


def node_record(node: NodePlan) -> NodeRecord:
    """Return the record of a node, with what a later command needs to connect to it."""
    return NodeRecord(
        index=node.index,
        name=node.node.name,
        host=node.node.host,
        user=node.node.user,
        port=node.node.port,
        address=node.address,
        python=node.python,
        first_rank=node.first_rank,
        nproc=node.nproc,
        activate=needed_by_python(node.node.activate),
        wrap=node.node.wrap,
        runs=node.runs,
    )


def needed_by_python(activate: str | None) -> str | None:
    """Return the activation that a later connection needs; a venv's Python needs only its path."""
    return None if activate and activate.startswith(("venv:", "conda:", "bootstrap")) else activate


def record_job(prepared: Prepared) -> JobRecord:
    """Lock the experiment, write and return its signed record.

    From here on an interrupt no longer removes the experiment: the job has to be ended.
    """
    # From here on the run handles interrupts.
    interrupt.hold_interrupts()
    interrupt.undo_on_interrupt(None)
    experiment = prepared.experiment
    experiment.lock()
    record = prepared.nodes.source.mark(first_record(prepared))
    try:
        if prepared.request.notify:
            experiment.write(NOTIFY, json.dumps(prepared.request.notify))
        experiment.write_signed(record)
    except OSError as error:
        experiment.discard()
        raise UsageError(
            f"{experiment.path} cannot be written: {error.strerror}; nothing was started",
            "free some space or name another directory with --experiments DIR",
        ) from error
    return record


def record_failure(place: Experiment, record: JobRecord, error: OrchestratorError) -> None:
    """Record and notify that the job could not be started, or was stopped before it started."""
    # Imported here because most starts succeed and do not need it.
    from orchestrator.head.events.notify import job_notifier
    from orchestrator.head.follow.conclusion import end_of_attempt

    failed = not_started(record, error)
    # A full disk must not hide why the job did not start.
    with contextlib.suppress(OSError):
        place.write_record(failed)
    with job_notifier(place, failed):
        tell(end_of_attempt(place, failed))


def not_started(record: JobRecord, error: OrchestratorError) -> JobRecord:
    """Return the record of an attempt that never ran: failed, or stopped by the user."""
    # Imported here because a successful start does not need it.
    from orchestrator.head.follow import verdict

    now, stopped = time.time(), isinstance(error, StoppedEarly)
    named = [node for node in record.nodes if node.name in error.names]
    if 1 < len(named) == len(record.nodes):
        # An error that all nodes have in common is not the fault of one node.
        named = []
    if stopped:
        cause = verdict.stopped_verdict(error.what, now)
    else:
        cause = verdict.unstarted_verdict(error.what, now, error.fix, named)
    return replace(
        record,
        state="stopped" if stopped else "failed",
        exit_code=error.exit_code,
        ended=now,
        verdict=cause,
        nodes=[
            node if node.state == "lost" else replace(node, state=experiment.NOT_STARTED)
            for node in record.nodes
        ],
    )


def record_start(place: Experiment, record: JobRecord) -> JobRecord:
    """Record that torchrun was started on every node, whether or not a head follows the job."""
    nodes = [replace(node, state="running") for node in record.nodes]
    record = replace(record, state="running", nodes=nodes)
    # If the disk is full, the head that follows the job writes the record later.
    with contextlib.suppress(OSError):
        # The record's signature covers its nodes and spares. Without spares the signature of the
        # starting record is still valid.
        (place.write_signed if record.spares else place.write_record)(record)
    return record


# -- further attempts -------------------------------------------------------------------------


def record_again(
    place: Experiment,
    ended: JobRecord,
    nodes: Sequence[NodeRecord],
    spares: Sequence[NodeRecord],
    port: int,
    line: str,
) -> JobRecord:
    """Write the signed record of the next attempt, and a line about it into each log."""
    begun = [with_line(place, as_before_a_start(node), line) for node in nodes]
    starting = replace(
        ended,
        attempt=len(ended.attempts) + 1,
        state="starting",
        nodes=begun,
        spares=list(spares),
        master=f"{begun[0].address}:{port}",
        head=experiment.this_head(),
    )
    try:
        place.write_signed(starting)
    except OSError as error:
        raise UsageError(f"{place.path} cannot be written: {error.strerror}") from error
    return starting


def as_before_a_start(node: NodeRecord) -> NodeRecord:
    return replace(
        node,
        state="starting",
        exit_code=None,
        ranks={},
        times={},
        clock=0.0,
        log_before=0,
        ranks_before=0,
    )


def with_line(place: Experiment, node: NodeRecord, line: str) -> NodeRecord:
    """Append a line to a node's log; return the record with the new sizes of its files."""
    logs = NodeLogs.of(place, node)
    try:
        own_line = "" if ends_whole(logs.text.path) else "\n"
        text = f"{own_line}orchestrator: {hiding.without_secrets(line)}\n".encode()
        size, ranks = logs.text.size, logs.ranks.size
        rest = logs.ranks.append(memoryview(f"{size} {NO_RANK}\n".encode()))
        # On a full disk neither file keeps a part of the line.
        if rest or logs.text.append(memoryview(text)):
            os.ftruncate(logs.text.fd, size)
            os.ftruncate(logs.ranks.fd, ranks)
    finally:
        logs.text.close()
        logs.ranks.close()
    sizes = [path.stat().st_size for path in (logs.text.path, logs.ranks.path)]
    return replace(node, log_before=sizes[0], ranks_before=sizes[1])


def ends_whole(path: Path) -> bool:
    """Return True if the file is empty or ends with a newline."""
    with files.open_plain(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


def lost_record(record: JobRecord, error: OrchestratorError) -> JobRecord:
    """Return the record of a job that is lost, as too few of its nodes came back."""
    last = replace(record.attempts[-1], restarted=False, why=error.what)
    return replace(
        record,
        state="lost",
        exit_code=error.exit_code,
        ended=time.time(),
        verdict=last.verdict,
        attempts=[*record.attempts[:-1], last],
    )


def failed_record(
    record: JobRecord,
    nodes: Sequence[NodeRecord],
    spares: Sequence[NodeRecord],
    error: OrchestratorError,
) -> JobRecord:
    """Return the record of an attempt that could not start, on the nodes chosen for it."""
    nodes = [replace(node, ranks={}, times={}) for node in nodes]
    number = len(record.attempts) + 1
    return not_started(replace(record, attempt=number, nodes=nodes, spares=list(spares)), error)


# -- the manifest -----------------------------------------------------------------------------


def describe_job(prepared: Prepared) -> str:
    """Write config.yaml, the code archive and manifest.json; return the error text, else ""."""
    # Imported when the job has started, which it does sooner so.
    from orchestrator.head.transfer import archive

    experiment, request, scan = prepared.experiment, prepared.request, prepared.nodes.scan
    config = replace(request.config, env=redact.redact_variables(request.config.env))
    missing = "config.yaml"
    try:
        experiment.write_yaml("config.yaml", load.config_as_data(config))
        missing = "manifest.json"
        tree = scan.ready(TREE_SECONDS) if scan else None
        most = config.sync.keep * MEGABYTE
        kept = archive.write_archive(tree, experiment.path / archive.NAME, most) if tree else None
        if scan and request.payload is None and (lacks := archive.missing_code(scan, tree, kept)):
            tell(of_launch.RecordIncomplete(lacks))
        data = {**make_manifest(prepared, tree), "kept": kept.digest if kept else None}
        experiment.write_json("manifest.json", data)
    except OSError as error:
        return f"{missing} is missing: {experiment.path}: {error.strerror}"
    return ""


def make_manifest(prepared: Prepared, tree: Tree | None = None) -> dict[str, Any]:
    """Return all facts known at launch that help to repeat or explain this run."""
    request, pairs = prepared.request, zip(prepared.nodes.probed, prepared.plan.nodes, strict=True)
    origin = request.origin
    return {
        "orchestrator": __version__,
        "python": sys.version.split()[0],
        "command": shlex.join(shown_command(request, request.command)),
        "directory": str(origin.directory if origin else Path.cwd()),
        "code": origin.code if origin else git_state(Path.cwd(), experiments_below(request)),
        "tree": tree.digest if tree else None,
        "hook": digest_of_hook(request.hook),
        "rerun_of": origin.experiment if origin else None,
        "config_file": str(request.config_file) if request.config_file else None,
        "timeline": {**prepared.times, "nodes": [node.times for node in prepared.nodes.reached]},
        "head_environment": redact.listed_variables(os.environ),
        "node_list": [
            # Fields that a line of the list leaves open are left out.
            {name: value for name, value in message.encode_value(node).items() if value}
            for node in prepared.nodes.source.nodes
        ],
        "nodes": [
            {
                "name": machine.name,
                "reached": machine.reached,
                "facts": machine.facts.to_json(),
                "environment": redact.shown_settings(node.settings),
                "reasons": {s.name: s.why for s in node.settings},
                "command": redact.redacted_command(node.paste),
            }
            for machine, node in pairs
        ],
    }


# -- the revision of the code --------------------------------------------------------------------


# The time limit of each git command at a launch; a large tree on a network disk is slow.
STATE_SECONDS = 5.0


def git_state(directory: Path, apart: Iterable[bytes] = ()) -> dict[str, Any] | None:
    """Return the revision and the edited files, None outside of a git repository or without git.

    `apart` are directories below this one, such as experiments, which are not code even if git
    tracks them.
    """
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return None
    paths = [":(top)", *(f":(exclude,literal){os.fsdecode(name)}" for name in apart)]
    changed = _git(directory, "diff", "HEAD", "--name-only", "-z", "--", *paths)
    return {
        "commit": commit,
        "branch": _git(directory, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed_files": [name for name in changed.split("\0") if name],
    }


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", *listing.NO_PROGRAMS, "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=STATE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""
