"""The commands for everyday work on all nodes of the list, and those that look before a launch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.launch import HELP, PROGRAM, TAKES_PROGRAM, launch_arguments
from orchestrator.cli.options import (
    FILE,
    Group,
    GroupedCommand,
    Seconds,
    arguments_from,
    color_option,
    command,
    experiment_names,
    json_option,
    launch_options,
    options_from,
    shared_options,
)
from orchestrator.common.wings import import_view
from orchestrator.config.launch import DEFAULT_NODES, Launch, Where

# Options of a launch that these commands share.
REACHING = ("connect_timeout", "strict_host_keys")
# The words after the first one belong to the remote command.
PASSES_ON = {"allow_interspersed_args": False}


def node_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a node of the list."""
    from orchestrator.head.nodes import node_list

    known = node_list.names_in_list(Path(ctx.params.get("nodes") or DEFAULT_NODES))
    return [name for name in known if name.startswith(incomplete)]


node_option = click.option(
    "--node",
    "chosen",
    multiple=True,
    metavar="N|NAME",
    shell_complete=node_names,
    help="Only this node of the list, by number or name; may be repeated. [default: all]",
)
workdir_option = click.option(
    "--workdir",
    metavar="DIR",
    help="Run in this directory. [default: workdir= in the list, else the current directory, each"
    " where the node has it, else the home directory]",
)


def reaching(
    function: Callable[..., Any], choice: Callable[..., Any] = node_option, *, jobs: bool = False
) -> Callable[..., Any]:
    """Add the options by which nodes are reached, and hand them on as one `chosen`."""
    taken = [option for option in options_from(Launch, "nodes") if option.name in REACHING]

    @functools.wraps(function)
    def with_chosen(where: Where, chosen: tuple[str, ...] | str, **params: Any) -> Any:
        from orchestrator.head.commands.machines.exec import Chosen

        typed = {name: params.pop(name) for name in REACHING}
        typed = {name: value for name, value in typed.items() if value is not None}
        nodes = (chosen,) if isinstance(chosen, str) else chosen
        return function(chosen=Chosen(where, nodes, **typed), **params)

    declared = getattr(function, "__click_params__", [])
    with_chosen.__click_params__ = [*declared, *reversed(taken)]  # type: ignore[attr-defined]
    return functools.partial(shared_options, reads_records=jobs)(choice(with_chosen))


@command("exec", context_settings=PASSES_ON)
@reaching
@workdir_option
@click.option(
    "--timeout",
    "limit",
    type=Seconds(),
    metavar="SECONDS",
    help="End the command after this time: 30, 10m.",
)
@click.option("-b", "--fold", is_flag=True, help="Show equal outputs once, at the end.")
@json_option
@color_option
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def exec_command(**params: Any) -> int:
    """Run CMD on all nodes at once, and show what it prints.

    Several words are a program and its arguments, passed on unchanged; one word is shell text, as
    with ssh: orchestrator exec 'ps aux | wc -l'. Ctrl-C ends it on all nodes. Standard input
    is empty there: send a script with push.
    """
    from orchestrator.head.commands.machines import exec as chores

    return chores.run_on_nodes(**params)


one_node = click.argument("chosen", metavar="N|NAME", shell_complete=node_names)


@command("ssh", context_settings=PASSES_ON)
@functools.partial(reaching, choice=one_node)
@workdir_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
def ssh_command(**params: Any) -> int:
    """Open a shell on one node.

    N is the node's number in the list, from 0. With CMD, run that: one word is shell text, several
    are a program and its arguments. The connection is made by your ssh program.
    """
    from orchestrator.head.commands.machines import exec as chores

    words = params.pop("words")
    chores.replace_by_ssh(words=words[words[:1] == ("--",) :], **params)


@command("pull")
@functools.partial(reaching, jobs=True)
@click.option("--checkpoints", is_flag=True, help="Also fetch the job's checkpoints.")
@click.option("--dry-run", is_flag=True, help="Show how much there is; fetch nothing.")
@json_option
@click.argument("wanted", required=False, metavar="[EXP_OR_PATH]", shell_complete=experiment_names)
@click.argument("destination", required=False, type=FILE, metavar="[DST]")
def pull_command(**params: Any) -> int:
    """Fetch files from all nodes: what a job left, or any path.

    EXP is an experiment [default: the newest]: its outputs are fetched into its directory here, or
    with DST into DST/node_<i>_<host>. Any other word is a path on the nodes, fetched into such
    directories below DST, or below the current one. A second call fetches only what is missing or
    has changed, and continues partial files.
    """
    from orchestrator.head.commands.machines import transfer

    return transfer.pull_files(**params)


@command("push")
@reaching
@click.option("--dry-run", is_flag=True, help="Show what would be sent; send nothing.")
@json_option
@click.argument("source", type=FILE, metavar="SRC")
@click.argument("destination", required=False, metavar="[DST]")
def push_command(**params: Any) -> int:
    """Send a directory or a file to all nodes at once.

    DST is the name of the copy on each node, such as /data/set or ~/set; with a / at its end, the
    directory that it is put into; left out, the same as here. Nothing is deleted there. A second
    call sends only what has changed, and continues partial files.
    """
    from orchestrator.head.commands.machines import transfer

    return transfer.push_files(**params)


# -- before launch ------------------------------------------------------------------------------
# The commands that take a launch's options and start no job: plan, doctor, verify and so on.


@click.command(
    "plan",
    cls=GroupedCommand,
    params=[*launch_options("plan"), PROGRAM],
    context_settings={**TAKES_PROGRAM, **HELP},
)
@color_option
@click.option("--explain", is_flag=True, help="Show where each setting of each node comes from.")
@json_option
def plan_command(explain: bool, **params: Any) -> int:
    """Print what a launch would run on each node; start nothing."""
    from orchestrator.head.commands import launch

    return launch.show_plan(arguments_from(params), explained=explain)


@click.command("verify", cls=GroupedCommand, params=[*launch_options("verify")])
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    help="Measure this backend. [default: distributed.backend, else nccl where there are GPUs]",
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
@json_option
@color_option
def verify_command(
    backend: str | None,
    max_size: str,
    seconds: float,
    strict: bool,
    **params: Any,
) -> int:
    """Run real collectives: find wrong results and slow nodes."""
    verify = import_view("verify")
    measurement = verify.Measurement(backend, max_size, seconds)
    return int(verify.verify(arguments_from(params), measurement, strict=strict))


@click.command("doctor", cls=GroupedCommand, params=[*launch_options("doctor"), PROGRAM])
@click.option("--quick", is_flag=True, help="Run only the checks that every launch runs.")
@click.option(
    "--fix-hints/--no-fix-hints", "hints", default=True, help="Show how to fix each problem."
)
@json_option
@color_option
def doctor_command(quick: bool, hints: bool, **params: Any) -> int:
    """Check every node and the network between them.

    Exit code 3 if a launch would fail. With SCRIPT, its copies on the nodes are compared too.
    """
    from orchestrator.head.commands.machines import nodes

    return nodes.run_doctor(arguments_from(params), full=not quick, hints=hints)


@click.command("bootstrap", cls=GroupedCommand, params=[*launch_options("nodes")])
@click.argument("words", nargs=-1, metavar="[FILE | PACKAGE...]")
@click.option("--name", metavar="NAME", default="", help="A name for the environment on the nodes.")
@click.option(
    "--find-links",
    multiple=True,
    metavar="DIR|URL",
    type=click.Path(),
    help="Also look for packages here.",
)
@click.option("--no-index", is_flag=True, help="Do not use the package index.")
@json_option
def bootstrap_command(
    words: tuple[str, ...], name: str, find_links: tuple[str, ...], no_index: bool, **params: Any
) -> int:
    """Create the same virtual environment on every node.

    Wheels are downloaded once, on this machine. FILE is a requirements.txt, pyproject.toml or
    uv.lock; PACKAGE is as for pip: torch numpy, torch==2.13.0, 'ray[train]'. A complete
    environment is kept.
    """
    from orchestrator.head.environments import command

    return command.bootstrap_nodes(
        arguments_from(params), words, name=name, find_links=find_links, index=not no_index
    )


@click.command("init", cls=GroupedCommand, params=[*launch_options("nodes")])
@click.argument("hosts", nargs=-1, metavar="[HOST...]")
@click.option(
    "--yes", is_flag=True, help="Ask nothing: use these machines, and create what is missing."
)
def init_command(hosts: tuple[str, ...], yes: bool, **params: Any) -> int:
    """Make the node list: choose machines, and check them.

    HOST is as in a node list: gpu1, ada@gpu[01-04]:2222, 'gpu1 slots=2'. Without one, the machines
    of ssh_config and known_hosts are offered. An existing list is not overwritten without asking.
    """
    from orchestrator.head.init import wizard

    return wizard.make_node_list(arguments_from(params), hosts, yes=yes)


@click.command("nodes", cls=GroupedCommand, params=[*launch_options("nodes")])
@click.option("--queue", is_flag=True, help="Show which jobs hold GPUs, and which wait.")
@click.option(
    "--warm",
    type=click.Choice(["list", "off"]),
    help="List the processes that --warm left, or end them.",
)
@json_option
@color_option
def nodes_command(
    queue: bool,
    warm: str | None,
    **params: Any,
) -> int:
    """List the machines: CPUs, GPUs, network, torch, disk.

    `orchestrator top` shows who uses them. Exit code 4 if one cannot be reached.
    """
    from orchestrator.head.commands.machines import nodes

    arguments = arguments_from(params)
    if warm:
        return nodes.warm_processes(arguments.where, off=warm == "off")
    return nodes.show_queue(arguments) if queue else nodes.list_nodes(arguments)


# -- jobs that others start: Slurm, or the user by hand ---------------------------------------


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

    options = sbatch.SbatchOptions(requeue=not no_requeue, **asked)
    if printed:
        return sbatch.print_batch_file(options, arguments, launch_arguments(arguments))
    return sbatch.submit_batch_file(options, arguments, launch_arguments(arguments), detach=detach)


submit = Group("submit", help="Submit the job to another launcher, and follow it.")
submit.add_command(submit_slurm)


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

    # The environment is read first, as its errors explain more than those of --master-port.
    return by_hand.run_part(by_hand.read_part(os.environ), wait, launch_arguments(arguments))
