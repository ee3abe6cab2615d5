"""Write a job as a Slurm batch file, and submit it."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE, OrchestratorError, UsageError
from orchestrator.common.program import installed_command
from orchestrator.config.launch import Launch, LaunchArguments
from orchestrator.head.commands.follow import report_end
from orchestrator.head.plan import redact
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.schedulers import queue
from orchestrator.head.schedulers.backend import (
    MARGIN_SECONDS,
    OUTPUT,
    watch_batch,
)
from orchestrator.head.screen.events import say
from orchestrator.head.screen.output import write_out
from orchestrator.head.start.request import resolve_request
from orchestrator.records import experiment, experiments
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.experiments import check_name


@dataclass(frozen=True)
class SbatchOptions:
    """The options of sbatch."""

    nnodes: int
    # GPUs of each node.
    gpus: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    requeue: bool = True
    # Other options of sbatch.
    more: tuple[str, ...] = ()
    # Shell lines before the command, such as for modules or conda.
    setup: tuple[str, ...] = ()


def text(
    asked: SbatchOptions, launch: Launch, command: Sequence[str], *, directory: Path | None = None
) -> str:
    """Write the batch file that runs this command; `directory` is its experiment."""
    lead = round(launch.grace) + MARGIN_SECONDS
    options = [
        f"--job-name={launch.name}",
        f"--nodes={asked.nnodes}",
        # One supervisor per node starts the ranks.
        "--ntasks-per-node=1",
        *([f"--gres=gpu:{asked.gpus}"] if asked.gpus else []),
        *([f"--cpus-per-task={asked.cpus_per_task}"] if asked.cpus_per_task else []),
        *([f"--mem={asked.mem}"] if asked.mem else []),
        *([f"--time={asked.time}"] if asked.time else []),
        *([f"--partition={asked.partition}"] if asked.partition else []),
        *([f"--account={asked.account}"] if asked.account else []),
        f"--output={(directory / OUTPUT) if directory else launch.name + '_%j.out'}",
        "--open-mode=append",
        *asked.more,
    ]
    if asked.requeue:
        options += ["--requeue", f"--signal=B:USR1@{lead}"]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {quoted(option)}" for option in options]
    lines.append("")
    if asked.requeue:
        lines += [
            f"# {lead} s before the time limit Slurm signals this script: the ranks save and stop,",
            "# and the job is queued again. The next attempt has the same experiment: the engine",
            "# resumes there; your own program finds what it saved in $ORCHESTRATOR_EXPERIMENT.",
        ]
    lines += ["set -e", *asked.setup]
    if directory is not None:
        lines.append(f"export ORCHESTRATOR_SUBMITTED={shlex.quote(str(directory))}")
    lines += [f"exec {shlex.join(command)}", ""]
    return "\n".join(lines)


def quoted(option: str) -> str:
    """Quote an option as Slurm reads it: like a shell, but without escapes inside quotes."""
    if "\n" in option or ('"' in option and "'" in option):
        raise UsageError(f"{option!r} cannot be written into a batch file")
    if shlex.quote(option) == option:
        return option
    return f"'{option}'" if "'" not in option else f'"{option}"'


def queue_job(
    asked: SbatchOptions,
    launch: Launch,
    command: Sequence[str],
    root: Path,
    env: Mapping[str, str],
) -> Experiment:
    """Submit a job; its experiment says that it is queued before Slurm can start it.

    The values of `env` travel in the environment that sbatch copies, and are in no file of ours.
    """
    submitted = experiments.create_experiment(root, launch.name)
    record = JobRecord(
        job=submitted.name,
        experiment=str(submitted.path),
        state="queued",
        command=redact.redacted_command(sys.argv),
        nodes=[],
        started=time.time(),
        head=experiment.this_head(),
        launch=launch,
        batch=True,
    )
    try:
        submitted.write("batch.sh", text(asked, launch, command, directory=submitted.path))
        submitted.write_signed(record)
        job = queue.submit_file(str(submitted.path / "batch.sh"), env)
    except OrchestratorError:
        submitted.discard()
        raise
    submitted.write(experiment.SLURM_JOB, job + "\n")
    return submitted


# -- batch file ---------------------------------------------------------------------------------
# `orchestrator submit slurm`: write the options as a batch file, and submit it.


def print_batch_file(
    asked: SbatchOptions, arguments: Sequence[str], launch: LaunchArguments
) -> int:
    # The job reads the secrets itself.
    request = checked(replace(launch, secret=()))
    write_out(text(asked, request.config.launch, command_line(asked, arguments, request)))
    return EXIT_DONE


def submit_batch_file(
    asked: SbatchOptions, arguments: Sequence[str], launch: LaunchArguments, *, detach: bool
) -> int:
    request = checked(launch)
    words, env = redact.env_apart(arguments, launch.program)
    env |= {setting.name: setting.value for setting in request.env if setting.secret}
    command = command_line(asked, words, request)
    queued = queue_job(asked, request.config.launch, command, request.where.experiments, env)
    if not detach:
        return watch_batch(queued, queued.read_record(), report_end, from_start=True)
    say(f"{queued.name} is Slurm's job {queued.slurm_job()}")
    say(f"follow it: orchestrator attach {queued.name}")
    return EXIT_DONE


def checked(launch: LaunchArguments) -> LaunchRequest:
    """Resolve the options of the launch, so that a wrong one is an error now."""
    launch.refuse(dict.fromkeys(("detach", "dry_run"), "cannot go into a batch file"))
    if launch.nodes_from == "list":
        raise UsageError("--nodes-from list: a batch job gets its nodes from Slurm", "leave it out")
    request = resolve_request(launch)
    check_name(request.config.launch.name)
    return request


def command_line(asked: SbatchOptions, words: Sequence[str], request: LaunchRequest) -> list[str]:
    """Write the command line of master_launch inside the job."""
    # By its path: on the compute node, PATH may be another one.
    command = [*installed_command("master_launch", "launch"), "--nodes-from", "slurm"]
    if request.config_file is not None and str(request.config_file) not in words:
        # The path comes from CONFIG_FILE, or is the default.
        command += ["--config", str(request.config_file)]
    resumes = request.config.checkpoint.resume != "never"
    if asked.requeue and request.target.kind == "engine" and not resumes:
        command += ["--set", "checkpoint.resume=auto"]
    return [*command, *words]
