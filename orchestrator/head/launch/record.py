"""Write down a launch: job.json, config.yaml and manifest.json."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import interrupt
from orchestrator.config import load
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.follow import verdict
from orchestrator.head.launch import git_info, redact
from orchestrator.head.launch.nodes import NodeSource
from orchestrator.head.launch.request import Request
from orchestrator.head.plan.model import Plan
from orchestrator.records import experiment
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.version import __version__


def first_record(request: Request, made: Plan, place: Experiment) -> JobRecord:
    """Describe a job that is about to start."""
    nodes = [
        NodeRecord(
            index=node.index,
            name=node.node.name,
            host=node.node.host,
            user=node.node.user,
            port=node.node.port,
            address=node.address,
            python=node.python,
            first_rank=node.first_rank,
            nproc=node.nproc,
        )
        for node in made.nodes
    ]
    config = request.where.ssh_config
    return JobRecord(
        job=made.job,
        experiment=str(place.path),
        state="starting",
        command=list(request.command),
        nodes=nodes,
        started=time.time(),
        head=experiment.this_head(),
        ssh_config=str(config.absolute()) if config else None,
        master=f"{made.master_address}:{made.master_port}",
        launch=replace(request.config.launch, start=made.start),
    )


def record_job(request: Request, source: NodeSource, made: Plan, place: Experiment) -> JobRecord:
    """Write the job down as one that this process follows. From here on it has to be ended.

    The request is one without secrets (see redact).
    """
    interrupt.hold()  # the run answers
    interrupt.undo_with(None)
    place.lock()
    record = source.mark(first_record(request, made, place))
    try:
        place.write_record(record)
        place.write("config.yaml", load.dump(request.config))
    except OSError as error:
        place.discard()
        raise UsageError(
            f"{place.path} cannot be written: {error.strerror}; nothing was started",
            "free some space or name another directory with --experiments DIR",
        ) from error
    return record


def not_started(record: JobRecord, error: OrchestratorError) -> JobRecord:
    now = time.time()
    found = verdict.not_started(error.what, now)
    return replace(record, state="failed", exit_code=error.exit_code, ended=now, verdict=found)


def write_manifest(
    request: Request, reached: Sequence[Reached], made: Plan, place: Experiment
) -> str:
    """Describe the code and the nodes; return why that could not be written, or nothing."""
    text = json.dumps(manifest(request, reached, made), indent=1)
    try:
        place.write("manifest.json", text + "\n")
    except OSError as error:
        return f"manifest.json is missing: {place.path}: {error.strerror}"
    return ""


def manifest(request: Request, reached: Sequence[Reached], made: Plan) -> dict[str, Any]:
    """Gather what is known at launch, for whoever wants to repeat or explain this run."""
    return {
        "orchestrator": __version__,
        "python": sys.version.split()[0],
        "command": shlex.join(redact.redacted_words(request.command)),
        "directory": str(Path.cwd()),
        "code": git_info.of(Path.cwd()),
        "config_file": str(request.config_file) if request.config_file else None,
        "head_environment": redact.redacted(os.environ),
        "nodes": [
            {
                "name": one.node.name,
                "facts": one.facts.to_json(),
                "environment": redact.redacted(node.env),
                "reasons": {s.name: s.why for s in node.settings},
                "command": redact.redacted_words(node.paste),
            }
            for one, node in zip(reached, made.nodes, strict=True)
        ],
    }
