"""`orchestrator generate slurm` and `submit slurm`: write the options as a batch file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.commands.follow import tell_end
from orchestrator.head.plan import redact
from orchestrator.head.screen.output import complain, say, tell
from orchestrator.head.start.request import Request, resolve
from orchestrator.head.status.backend import watch_batch
from orchestrator.launchers.slurm import sbatch
from orchestrator.launchers.slurm.sbatch import SbatchOptions
from orchestrator.records.experiments import check_name


def generate(asked: SbatchOptions, arguments: Sequence[str], launch: LaunchArguments) -> int:
    refuse_urls(arguments)
    options = {name: value for name, value in launch.launch.items() if name != "notify"}
    request = checked(replace(launch, secret=(), env_pass=(), launch=options))  # the job reads them
    command = command_line(asked, arguments, request)
    tell(sbatch.text(asked, request.config.launch, command))
    return EXIT_DONE


def submit(
    asked: SbatchOptions, arguments: Sequence[str], launch: LaunchArguments, *, detach: bool
) -> int:
    refuse_urls(arguments)
    request = checked(launch)
    words, env = redact.env_apart(arguments, launch.program)
    env |= {setting.name: setting.value for setting in request.env if setting.secret}
    env |= {target.variable: target.to for target in request.told if target.variable}
    command = command_line(asked, words, request)
    experiments = request.where.experiments
    experiment = sbatch.submit(asked, request.config.launch, command, experiments, env)
    if not detach:
        return watch_batch(experiment, experiment.read_record(), say, tell_end, anew=True)
    say(f"{experiment.name} is Slurm's job {experiment.slurm_job()}")
    say(f"follow it: orchestrator attach {experiment.name}")
    return EXIT_DONE


def refuse_urls(arguments: Sequence[str]) -> None:
    """Refuse a webhook that the batch file would show."""
    if any(word.removeprefix("--notify=").startswith("webhook:http") for word in arguments):
        raise UsageError(
            "--notify webhook: its URL would stand in the batch file",
            "put it into a variable or a file: --notify webhook:env:NAME or webhook:file:PATH",
        )


def checked(launch: LaunchArguments) -> Request:
    """Resolve the options of the launch, so that a wrong one is an error now."""
    for name in ("detach", "dry_run"):
        if getattr(launch, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} cannot go into a batch file", "leave it out")
    if launch.nodes_from == "list":
        raise UsageError("--nodes-from list: a batch job gets its nodes from Slurm", "leave it out")
    request = resolve(launch)
    check_name(request.config.launch.name)
    return request


def command_line(asked: SbatchOptions, given: Sequence[str], request: Request) -> list[str]:
    """Write the command line of master_launch inside the job."""
    command = [*program(), "--nodes-from", "slurm"]
    if request.config_file is not None and str(request.config_file) not in given:
        command += ["--config", str(request.config_file)]  # from CONFIG_FILE, or the default
    resumes = request.config.checkpoint.resume != "never"
    if asked.requeue and request.target.kind == "engine" and not resumes:
        command += ["--set", "checkpoint.resume=auto"]
    if asked.cpus_per_task is None and "--cpus-per-task" not in " ".join(asked.more):
        complain(
            "note: without --cpus-per-task Slurm may give each node one processor only, for all of"
            " its ranks and their data loaders"
        )
    return [*command, *given]


def program() -> list[str]:
    """Name this installation by its path: on the compute node, PATH may be another one."""
    beside = Path(sys.executable).with_name("master_launch")
    if os.access(beside, os.X_OK):
        return [str(beside)]
    return [sys.executable, "-m", "orchestrator", "launch"]
