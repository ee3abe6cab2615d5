"""The command that starts a job, and what it shares with those that look before a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.options import (
    Command,
    GroupedCommand,
    GroupedOption,
    Seconds,
    arguments_from,
    color_option,
    launch_options,
)
from orchestrator.common.errors import EXIT_DONE
from orchestrator.common.wings import view
from orchestrator.config.launch import NODES, LaunchArguments
from orchestrator.config.launch import PROGRAM as PROGRAM_GROUP

SKILL = Path(__file__).with_name("agents.md")  # a link to docs/, which a wheel holds whole
TAKES_PROGRAM = {"ignore_unknown_options": False, "allow_interspersed_args": False}
HELP = {"help_option_names": ["-h", "--help"]}
PROGRAM = click.Argument(
    ["program"], nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS...]]"
)


def aliases() -> list[click.Parameter]:
    """Make the options that are another way to type two of the others."""
    no_check = GroupedOption(
        ["--no-check", "check"], flag_value="none", help="Same as --check none.", group=NODES
    )
    no_activate = GroupedOption(
        ["--no-activate", "activate"],
        flag_value="none",
        help="Same as --activate none: not in the environment of `orchestrator bootstrap`.",
        group=PROGRAM_GROUP,
    )
    kinds = click.Choice(["ssh", "slurm", "accelerate"])
    launcher = click.Option(["--launcher"], type=kinds, multiple=True, hidden=True)
    return [no_check, no_activate, launcher]


@click.command(
    "launch",
    cls=GroupedCommand,
    params=[*launch_options("launch"), *aliases(), PROGRAM],
    context_settings={**TAKES_PROGRAM, **HELP},
)
@color_option
def launch_command(**params: Any) -> int:
    """Run SCRIPT, or the built-in engine, on all nodes.

    Arguments after SCRIPT are passed to it unchanged. While it runs, d leaves it running, Ctrl-C
    asks it to stop, and a second Ctrl-C kills it.
    """
    from orchestrator.head.commands import launch

    arguments = arguments_from(params)
    return launch.launch(arguments)


@click.command(
    "try",
    cls=GroupedCommand,
    params=[*launch_options("launch"), *aliases(), PROGRAM],
    context_settings={**TAKES_PROGRAM, **HELP},
)
@click.option("--metric", required=True, metavar="NAME", help="The number to print.")
@click.option("--minutes", type=float, metavar="M", help="Same as --time-limit, in minutes.")
@color_option
def try_command(metric: str, minutes: float | None, **params: Any) -> int:
    """Run SCRIPT on one free node, and print one number as JSON.

    It waits in the queue, for one node unless --nnodes says otherwise, and runs the files of this
    directory as they are now. The number is one that a Trainer measures, or that the program
    prints. Exit code 0 also when its time is over; 1 if there is no such number.
    """
    from orchestrator.head.commands.sweep import trial

    return trial.attempt(arguments_from(params), metric, minutes)


@click.command("skill", cls=Command, context_settings=HELP)
def skill_command() -> int:
    """Print one page that tells an agent how to use this."""
    from orchestrator.head.screen.output import write_out

    write_out(SKILL.read_text(encoding="utf-8"))
    return EXIT_DONE


def launch_arguments(arguments: Sequence[str]) -> LaunchArguments:
    """Parse what follows `master_launch`; a wrong option is an error here."""
    with launch_command.make_context("master_launch", list(arguments)) as context:
        return arguments_from(context.params)


# -- before launch ------------------------------------------------------------------------------
# The commands that take a launch's options and start no job: plan, doctor, verify and so on.


@click.command(
    "plan",
    cls=GroupedCommand,
    params=[*launch_options("plan"), *aliases(), PROGRAM],
    context_settings={**TAKES_PROGRAM, **HELP},
)
@color_option
@click.option("--explain", is_flag=True, help="Show where each setting of each node comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan_command(explain: bool, as_json: bool, **params: Any) -> int:
    """Print what a launch would run on each node; start nothing."""
    from orchestrator.head.commands import launch

    return launch.plan(arguments_from(params), as_json=as_json, explained=explain)


@click.command("verify", cls=GroupedCommand, params=[*launch_options("verify"), *aliases()])
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    help="Measure this one. [default: distributed.backend, else nccl where there are GPUs]",
)
@click.option(
    "--max-size", default="1G", show_default=True, help="Size of the largest message: 64M, 1G."
)
@click.option(
    "--seconds",
    type=Seconds(),
    default=60.0,
    show_default=True,
    help="Measure for this many seconds.",
)
@click.option(
    "--strict", is_flag=True, help="Exit with code 3 if a node, a link or a device is slow."
)
@click.option(
    "--sdc", is_flag=True, help="Only look for silent corruption: compute the same on all devices."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@color_option
def verify_command(
    backend: str | None,
    max_size: str,
    seconds: float,
    strict: bool,
    sdc: bool,
    as_json: bool,
    **params: Any,
) -> int:
    """Run real collectives: are they right, how fast, who is slow?

    It also predicts how long a step of the configured model takes with each way of sharding it.
    """
    verify = view("verify")
    measurement = verify.Measurement(backend, max_size, seconds, sdc)
    code: int = verify.verify(arguments_from(params), measurement, strict=strict, as_json=as_json)
    return code


@click.command("doctor", cls=GroupedCommand, params=[*launch_options("doctor"), PROGRAM])
@click.option("--quick", is_flag=True, help="Run only the checks that every launch runs.")
@click.option(
    "--history",
    is_flag=True,
    help="Examine nothing; tell what each node did wrong in earlier jobs of yours.",
)
@click.option(
    "--nightly",
    is_flag=True,
    help="For cron: print what is bad and what has changed, and cordon nodes that lack something.",
)
@click.option(
    "--fix-hints/--no-fix-hints", "hints", default=True, help="Say how to fix each problem."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@color_option
def doctor_command(
    quick: bool, history: bool, nightly: bool, hints: bool, as_json: bool, **params: Any
) -> int:
    """Check every node and the network between them.

    Exit code 3 if a launch would fail. With SCRIPT, its copies on the nodes are compared too.
    """
    from orchestrator.head.commands.machines import doctor

    arguments = arguments_from(params)
    if history:
        return doctor.show(arguments.where.node_list, as_json=as_json)
    return doctor.examine(arguments, full=not quick, hints=hints, as_json=as_json, nightly=nightly)


@click.command("bootstrap", cls=GroupedCommand, params=[*launch_options("nodes")])
@click.argument("words", nargs=-1, metavar="[FILE | PACKAGE...]")
@click.option("--name", metavar="NAME", default="", help="Name the environment on the nodes, too.")
@click.option(
    "--into",
    metavar="DIR",
    default="",
    help="The nodes' directory of environments. [default: ~/.orchestrator/environments]",
)
@click.option("--from-index", is_flag=True, help="Each node downloads by itself, from the index.")
@click.option(
    "--find-links",
    multiple=True,
    metavar="DIR|URL",
    type=click.Path(),
    help="Look for packages here, too.",
)
@click.option("--no-index", is_flag=True, help="Look for packages nowhere else.")
@click.option("--prune", is_flag=True, help="Remove environments without name and job.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bootstrap_command(
    words: tuple[str, ...],
    name: str,
    into: str,
    from_index: bool,
    find_links: tuple[str, ...],
    no_index: bool,
    prune: bool,
    as_json: bool,
    **params: Any,
) -> int:
    """Make the same virtual environment on every node.

    It is made of wheels that are downloaded once, here. FILE is a requirements.txt, pyproject.toml
    or uv.lock; PACKAGE is as for pip: torch numpy, torch==2.13.0, 'ray[train]'. What is whole
    already stays.
    """
    from orchestrator.head.environments import command

    asked = command.Asked(words, into, name, find_links, not no_index, from_index, prune, as_json)
    return command.bootstrap(arguments_from(params), asked)


@click.command("nodes", cls=GroupedCommand, params=[*launch_options("nodes")])
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@color_option
def nodes_command(as_json: bool, **params: Any) -> int:
    """List what each machine is: CPUs, GPUs, networks, torch, disk.

    Exit code 4 if one cannot be reached.
    """
    from orchestrator.head.commands.machines import nodes

    return nodes.nodes(arguments_from(params), as_json=as_json)


@click.command("who", cls=GroupedCommand, params=[*launch_options("nodes")])
@click.option(
    "--idle",
    type=Seconds(),
    metavar="TIME",
    help="Only jobs whose GPUs have done nothing for so long, or nobody knows: 30m.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@color_option
def who_command(idle: float | None, as_json: bool, **params: Any) -> int:
    """Show who uses each GPU: user, job, age, use.

    Nodes without GPUs are shown by cores. Processes of others are shown, too. Exit code 4 if a
    node cannot be reached.
    """
    from orchestrator.head.commands.machines import nodes, queue

    if idle is not None:
        return queue.idle(arguments_from(params), idle, as_json=as_json)
    return nodes.who(arguments_from(params), as_json=as_json)


@click.command("queue", cls=GroupedCommand, params=[*launch_options("nodes")])
@click.option("--remove", "id", metavar="ID", help="Take a launch of yours out of the queue.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@color_option
def queue_command(as_json: bool, id: str | None, **params: Any) -> int:
    """Show who holds GPUs of the nodes, who waits, and why.

    `master_launch --queue` waits. Exit code 4 if a node cannot be reached.
    """
    from orchestrator.head.commands.machines import queue

    if id is not None:
        return queue.remove(arguments_from(params), id)
    return queue.queue(arguments_from(params), as_json=as_json)
