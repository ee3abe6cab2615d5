"""The command lines of the doors. Parse, call one function; cli.py adds them to its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

BEHIND = "[LAUNCH-OPTIONS...] [SCRIPT [ARGS...]]"
FILE = click.Path(path_type=Path)
THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def slurm_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is asked of Slurm; what stands behind goes to master_launch."""
    for option in (
        click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=BEHIND),
        click.option(
            "--sbatch", "more", multiple=True, metavar="OPTION", help="Any other one of sbatch's."
        ),
        click.option(
            "--setup", multiple=True, metavar="LINE", help="Shell before it: 'module load cuda'."
        ),
        click.option("--no-requeue", is_flag=True, help="Do not go on after the time limit."),
        click.option("--mem", help="Memory per node: 200G."),
        click.option("--cpus-per-task", type=click.IntRange(1), metavar="N", help="Per node."),
        click.option("--account", help="Who pays."),
        click.option("--partition", help="Where it waits."),
        click.option("--time", help="Its limit: 24:00:00, or 2-12:00:00."),
        click.option("--gpus", type=click.IntRange(0), metavar="N", help="GPUs per node."),
        click.option("--nnodes", type=click.IntRange(1), required=True, metavar="N", help="Nodes."),
    ):
        function = option(function)
    return function


@click.command("slurm", context_settings=THROUGH)
@slurm_options
def generate_slurm(**options: Any) -> int:
    """Print a batch file; sbatch FILE starts it. What Slurm asks for comes first."""
    from orchestrator.launchers.slurm import batch_file

    return batch_file.generate(options, launch_options(options["words"]))


@click.command("slurm", context_settings=THROUGH)
@slurm_options
@click.option("--detach", is_flag=True, help="Hand it in and leave.")
def submit_slurm(**options: Any) -> int:
    """Hand it in, wait for it, show its logs. What Slurm asks for comes first."""
    from orchestrator.launchers.slurm import batch_file

    return batch_file.submit(options, launch_options(options["words"]))


def groups(kind: type[click.Group]) -> tuple[click.Group, ...]:
    """`generate` and `submit`, with a command for each launcher."""
    generate = kind("generate", help="The same job as a file for another launcher.")
    for one in (generate_slurm, generate_accelerate, generate_compose, generate_kubernetes):
        generate.add_command(one)
    generate.add_command(generate_dockerfile)
    submit = kind("submit", help="Hand the job in to another launcher, and stay with it.")
    submit.add_command(submit_slurm)
    return generate, submit


def launch_options(words: tuple[str, ...]) -> dict[str, Any]:
    """The options of master_launch that another command was given, refused here if wrong."""
    root = click.get_current_context().find_root().command
    assert isinstance(root, click.Group)
    launch = root.commands["launch"]
    with launch.make_context("master_launch", list(words)) as context:
        return dict(context.params)


# -- a node by hand -------------------------------------------------------------------------------


@click.command("run-node", context_settings=THROUGH)
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    help="Seconds for all nodes to be there.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=BEHIND)
def run_node(**options: Any) -> int:
    """Run this machine's part of a job, without SSH: type it on each of the machines.

    MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK and NPROC_PER_NODE in the environment say which
    part. Nothing starts before all nodes are there and agree.
    """
    from orchestrator.launchers.by_hand import run_node as by_hand

    mine = by_hand.part(os.environ)  # first: its words are better than those of --master-port
    return by_hand.run(mine, options["wait"], launch_options(options["words"]))


# -- accelerate -----------------------------------------------------------------------------------


@click.command("accelerate", context_settings={"allow_interspersed_args": False})
@click.option(
    "--nodes", type=FILE, default="node_ip_list.txt", show_default=True, help="The node list."
)
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="Nodes, without a list.")
@click.option("--main-process-ip", metavar="ADDRESS", help="Node 0 [default: as in the list].")
@click.option("--main-process-port", type=click.IntRange(1, 65535), help="Default: 29500.")
@click.option("--nproc", type=click.IntRange(1), metavar="N", help="Processes per node.")
@click.option("--accelerate-config", type=FILE, metavar="FILE", help="Whose other keys they keep.")
@click.option("--out", type=FILE, default=".", help="Where they are written [default: here].")
@click.option("--force", is_flag=True, help="Replace them.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS...]]")
def generate_accelerate(**options: Any) -> int:
    """Write accelerate's file for each node, and print what to type there.

    `master_launch --accelerate-config FILE SCRIPT` does all of it by itself.
    """
    from orchestrator.launchers import accelerate

    return accelerate.generate(options)


# -- containers -----------------------------------------------------------------------------------


def container_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is asked of the containers; what stands behind goes to run-node in each of them."""
    for option in (
        click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=BEHIND),
        click.option("--name", help="Of the whole [default: that of the experiments, multinode]."),
        click.option(
            "--shm-size", default="8g", show_default=True, metavar="SIZE", help="Of /dev/shm."
        ),
        click.option("--gpus", type=click.IntRange(0), metavar="N", help="GPUs per node."),
        click.option("--image", required=True, help="generate dockerfile makes one."),
        click.option("--nnodes", type=click.IntRange(1), required=True, metavar="N", help="Nodes."),
    ):
        function = option(function)
    return function


@click.command("compose", context_settings=THROUGH)
@container_options
def generate_compose(**options: Any) -> int:
    """Print a Compose file: a service per node, on one machine."""
    from orchestrator.launchers.containers import compose

    return compose.generate(options, launch_options(options["words"]))


@click.command("kubernetes", context_settings=THROUGH)
@container_options
@click.option("--namespace", help="Default: that of kubectl.")
@click.option("--volume", metavar="CLAIM", help="A claim that all pods share, for experiments.")
@click.option(
    "--retries", type=click.IntRange(0), default=3, show_default=True, help="After a lost node."
)
def generate_kubernetes(**options: Any) -> int:
    """Print an Indexed Job and its Service: a pod per node."""
    from orchestrator.launchers.containers import kubernetes

    return kubernetes.generate(options, launch_options(options["words"]))


@click.command("dockerfile")
@click.option("--base", help="An image with torch [default: one of PyTorch's, with CUDA].")
def generate_dockerfile(base: str | None) -> int:
    """Print a Dockerfile: torch, this package, and the directory it is built in."""
    from orchestrator.launchers.containers import dockerfile

    return dockerfile.generate(base or dockerfile.BASE)
