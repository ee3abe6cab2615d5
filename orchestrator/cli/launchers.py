"""The commands for jobs that somebody else starts: Slurm, you by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from orchestrator.cli.launch import launch_arguments
from orchestrator.cli.options import command

REST = "[LAUNCH-OPTIONS...] [SCRIPT [ARGS...]]"
THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}

nnodes_option = click.option(
    "--nnodes", type=click.IntRange(1), required=True, metavar="N", help="Number of nodes."
)
gpus_option = click.option(
    "--gpus", type=click.IntRange(0), metavar="N", help="Number of GPUs per node."
)
rest_argument = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar=REST)


def slurm_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for Slurm; the arguments that follow go to master_launch."""
    for option in (
        rest_argument,
        click.option(
            "--sbatch", "more", multiple=True, metavar="OPTION", help="Pass OPTION to sbatch."
        ),
        click.option(
            "--setup",
            multiple=True,
            metavar="LINE",
            help="Run a line of shell before the job: 'module load cuda'.",
        ),
        click.option("--no-requeue", is_flag=True, help="Do not continue after the time limit."),
        click.option("--mem", help="Memory per node: 200G."),
        click.option(
            "--cpus-per-task", type=click.IntRange(1), metavar="N", help="Number of CPUs per node."
        ),
        click.option("--account", help="The account that is charged."),
        click.option("--partition", help="The partition to queue in."),
        click.option("--time", help="The time limit: 24:00:00, or 2-12:00:00."),
        gpus_option,
        nnodes_option,
    ):
        function = option(function)
    return function


@command("slurm", context_settings=THROUGH)
@slurm_options
@click.option("--detach", is_flag=True, help="Submit the job, and do not wait for it.")
@click.option("--print", "printed", is_flag=True, help="Print the batch file; submit nothing.")
def submit_slurm(
    arguments: tuple[str, ...], detach: bool, printed: bool, no_requeue: bool, **asked: Any
) -> int:
    """Submit the job, wait for it and show its logs.

    These options come first; LAUNCH-OPTIONS are those of master_launch.
    """
    from orchestrator.launchers import sbatch
    from orchestrator.launchers.sbatch import SbatchOptions

    options = SbatchOptions(requeue=not no_requeue, **asked)
    if printed:
        return sbatch.generate(options, arguments, launch_arguments(arguments))
    return sbatch.submit(options, arguments, launch_arguments(arguments), detach=detach)


def submit_group(kind: type[click.Group]) -> click.Group:
    submit = kind("submit", help="Submit the job to another launcher, and follow it.")
    submit.add_command(submit_slurm)
    return submit


# -- a node by hand -------------------------------------------------------------------------------


@command("run-node", context_settings=THROUGH)
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    help="Wait this many seconds for the other nodes.",
)
@rest_argument
def run_node(wait: float, arguments: tuple[str, ...]) -> int:
    """Run this machine's part of a job, without SSH.

    MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK and NPROC_PER_NODE in the environment say which
    part. Nothing starts before all nodes are there and agree.
    """
    from orchestrator.launchers import run_node as by_hand

    mine = by_hand.part(os.environ)  # first: its errors say more than those of --master-port
    return by_hand.run(mine, wait, launch_arguments(arguments))
