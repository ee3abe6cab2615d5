"""`orchestrator generate slurm` and `submit slurm`: from what was typed to a batch file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from orchestrator.errors import EXIT_DONE, UsageError
from orchestrator.head.commands import jobs
from orchestrator.head.launch.request import Request
from orchestrator.launchers.slurm import sbatch
from orchestrator.launchers.slurm.sbatch import Wish

DEFAULTS = {
    "default_config": "config/multi_node/distributed_two_nodes.yaml",
    "default_hook": "scripts/multi_node/config_node.sh",
}


def generate(options: dict[str, Any], launch: dict[str, Any]) -> int:
    wish, words, _ = asked(options, launch)
    jobs.print_out(sbatch.text(wish, words))
    return EXIT_DONE


def submit(options: dict[str, Any], launch: dict[str, Any]) -> int:
    wish, words, request = asked(options, launch)
    place = sbatch.hand_in(wish, words, request.experiments, sys.argv)
    job = place.slurm_job()
    if options["detach"]:
        jobs.say(f"{place.name} is Slurm's job {job}")
        jobs.say(f"take it up: orchestrator attach {place.name}")
        return EXIT_DONE
    return jobs.watch(place, place.read_record(), anew=True)


def asked(options: dict[str, Any], launch: dict[str, Any]) -> tuple[Wish, list[str], Request]:
    """What is asked of Slurm, and the command line of master_launch inside the job."""
    for name in ("detach", "dry_run"):
        if launch[name]:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} has no place in a batch file", "leave it out")
    if launch["launcher"] == "ssh":
        raise UsageError("--launcher ssh: a batch job gets its nodes from Slurm", "leave it out")
    request = jobs.request_of(launch, **DEFAULTS)  # whatever is wrong with it is told now
    chosen = request.config.launch
    wish = Wish(
        nnodes=options["nnodes"],
        gpus=options["gpus"],
        time=options["time"],
        partition=options["partition"],
        account=options["account"],
        cpus_per_task=options["cpus_per_task"],
        mem=options["mem"],
        name=chosen.name,
        requeue=not options["no_requeue"],
        grace=chosen.grace,
        more=options["more"],
        setup=options["setup"],
    )
    words = [*program(), "--launcher", "slurm"]
    if request.config_file is not None and str(request.config_file) not in options["words"]:
        words += ["--config", str(request.config_file)]  # from CONFIG_FILE, or the default
    resumes = request.config.checkpoint.resume != "never"
    if wish.requeue and request.target.kind == "engine" and not resumes:
        words += ["--set", "checkpoint.resume=auto"]
    if wish.cpus_per_task is None and "--cpus-per-task" not in " ".join(wish.more):
        sys.stderr.write(
            "note: without --cpus-per-task Slurm may give each node one processor only, for all of"
            " its ranks and their data loaders\n"
        )
    return wish, [*words, *options["words"]], request


def program() -> list[str]:
    """The same installation on the compute node, by its path: a login's PATH is not a job's."""
    beside = Path(sys.executable).with_name("master_launch")
    if os.access(beside, os.X_OK):
        return [str(beside)]
    return [sys.executable, "-m", "orchestrator", "launch"]
