"""A job as a batch file of Slurm's: written here, printed by `generate`, handed in by `submit`."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.head.launch import redact
from orchestrator.head.slurm import queue
from orchestrator.head.slurm.batch_job import OUTPUT
from orchestrator.records import experiment
from orchestrator.records.experiment import Experiment, JobRecord

TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+|\d+-\d+:\d+|\d+-\d+:\d+:\d+|infinite|UNLIMITED")
ONE_WORD = re.compile(r"[A-Za-z0-9_.,:@%+=/\[\]*&|()!~^-]+")
MARGIN = 90  # seconds beyond the ranks' grace: the last step, and the checkpoint after it


@dataclass(frozen=True)
class Wish:
    """What is asked of Slurm."""

    nnodes: int
    gpus: int | None = None  # per node
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    name: str = "multinode"
    requeue: bool = True
    grace: float = 30.0
    more: tuple[str, ...] = ()  # any other option of sbatch's
    setup: tuple[str, ...] = ()  # lines of shell before it: modules, conda

    def __post_init__(self) -> None:
        if self.time is not None and not TIME.fullmatch(self.time):
            raise UsageError(
                f"--time {self.time}: this is no time of Slurm's",
                "minutes, or HH:MM:SS, or DAYS-HH:MM:SS: 24:00:00",
            )
        for option in self.more:
            if not option.startswith("-"):
                raise UsageError(
                    f"--sbatch {option!r}: an option begins with -", "such as --sbatch=--qos=long"
                )


def text(wish: Wish, words: Sequence[str], *, place: Path | None = None) -> str:
    """The batch file. `words`: what master_launch is called with; `place`: its experiment."""
    lead = round(wish.grace) + MARGIN
    options = [
        f"--job-name={wish.name}",
        f"--nodes={wish.nnodes}",
        "--ntasks-per-node=1",  # one supervisor per node, which starts the ranks
        *([f"--gres=gpu:{wish.gpus}"] if wish.gpus else []),
        *([f"--cpus-per-task={wish.cpus_per_task}"] if wish.cpus_per_task else []),
        *([f"--mem={wish.mem}"] if wish.mem else []),
        *([f"--time={wish.time}"] if wish.time else []),
        *([f"--partition={wish.partition}"] if wish.partition else []),
        *([f"--account={wish.account}"] if wish.account else []),
        f"--output={(place / OUTPUT) if place else wish.name + '_%j.out'}",
        "--open-mode=append",
        *wish.more,
    ]
    if wish.requeue:
        options += ["--requeue", f"--signal=B:USR1@{lead}"]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {quoted(option)}" for option in options]
    lines.append("")
    if wish.requeue:
        lines += [
            f"# {lead} s before the time limit Slurm signals this script: the ranks save and stop,",
            "# and the job is queued again. The next attempt has the same experiment: the engine",
            "# resumes there; your own program finds what it saved in $ORCHESTRATOR_EXPERIMENT.",
        ]
    lines += ["set -e", *wish.setup]
    if place is not None:
        lines.append(f"export ORCHESTRATOR_SUBMITTED={shlex.quote(str(place))}")
    lines += [f"exec {shlex.join(words)}", ""]
    return "\n".join(lines)


def quoted(option: str) -> str:
    """Slurm reads these lines as a shell reads words, but knows no escapes inside quotes."""
    if "\n" in option or ('"' in option and "'" in option):
        raise UsageError(f"{option!r} cannot be written into a batch file")
    if ONE_WORD.fullmatch(option):
        return option
    return f"'{option}'" if "'" not in option else f'"{option}"'


def hand_in(
    wish: Wish, words: Sequence[str], experiments: Path, command: Sequence[str]
) -> Experiment:
    """Submit it: an experiment with a record that says it waits, before Slurm can start it."""
    place = experiment.create(experiments, wish.name)
    record = JobRecord(
        job=place.name,
        experiment=str(place.path),
        state="queued",
        command=redact.redacted_words(command),
        nodes=[],
        started=time.time(),
        head=experiment.this_head(),
        grace=wish.grace,
        batch=True,
    )
    files = ("batch.sh", "job.json")
    try:
        place.write("batch.sh", text(wish, words, place=place.path))
        place.write_record(record)
        job = queue.submit(str(place.path / "batch.sh"))
    except OrchestratorError:
        for name in files:
            (place.path / name).unlink(missing_ok=True)
        place.discard()
        raise
    place.write(experiment.SLURM_JOB, job + "\n")
    return place
