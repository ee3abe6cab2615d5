"""The commands for everyday work on all nodes of the list."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from orchestrator.cli.options import (
    FILE,
    Group,
    Seconds,
    color_option,
    command,
    experiment_names,
    options_from,
    shared,
)
from orchestrator.config.launch import DEFAULT_NODES, Launch, Where

REACHING = ("connect_timeout", "strict_host_keys")  # options of a launch that serve here
PASSES_ON = {"allow_interspersed_args": False}  # what follows the first word belongs to it


def node_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a node of the list."""
    from orchestrator.head.nodes import node_list

    known = node_list.names(Path(ctx.params.get("nodes") or DEFAULT_NODES))
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
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def reaching(
    function: Callable[..., Any], choice: Callable[..., Any] = node_option, *, jobs: bool = False
) -> Callable[..., Any]:
    """Add the options by which nodes are reached, and hand them on as one `chosen`."""
    names = [item.name for item in dataclasses.fields(Launch) if item.name in REACHING]

    def with_chosen(where: Where, chosen: tuple[str, ...] | str, **params: Any) -> Any:
        from orchestrator.head.commands.machines.exec import Chosen

        typed = {name: params.pop(name) for name in names}
        typed = {name: value for name, value in typed.items() if value is not None}
        nodes = (chosen,) if isinstance(chosen, str) else chosen
        return function(chosen=Chosen(where, nodes, **typed), **params)

    with_chosen.__doc__ = function.__doc__
    with_chosen.__name__ = function.__name__
    declared = getattr(function, "__click_params__", [])
    taken = [option for option in options_from(Launch, "nodes") if option.name in REACHING]
    with_chosen.__click_params__ = [*declared, *reversed(taken)]  # type: ignore[attr-defined]
    return partial(shared, reads_records=jobs)(choice(with_chosen))


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
    with ssh: orchestrator exec 'ps aux | wc -l'. Ctrl-C ends it on all nodes. `< FILE` is the
    standard input on each of them.
    """
    from orchestrator.head.commands.machines import exec as chores

    return chores.execute(**params)


one_node = click.argument("chosen", metavar="N|NAME", shell_complete=node_names)


@command("ssh", context_settings=PASSES_ON)
@partial(reaching, choice=one_node, jobs=True)
@click.option(
    "--job",
    metavar="EXP",
    shell_complete=experiment_names,
    help="Have the environment of this job's ranks there. [default: the newest that is running]",
)
@click.option("--no-job", is_flag=True, help="Have no job's environment.")
@workdir_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
def ssh_command(**params: Any) -> int:
    """Open a shell on one node, with the environment of its job.

    N is the node's number in the list, from 0. With CMD, run that: one word is shell text, several
    are a program and its arguments. It is your ssh program that connects.
    """
    from orchestrator.head.commands.machines import exec as chores

    words = params.pop("words")
    chores.ssh(words=words[words[:1] == ("--",) :], **params)


def pullable(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete an experiment's name; a path of the nodes often is one of this machine, too."""
    names = experiment_names(ctx, parameter, incomplete)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


@command("pull")
@partial(reaching, jobs=True)
@click.option("--checkpoints", is_flag=True, help="Fetch the job's checkpoints, too.")
@click.option("--dry-run", is_flag=True, help="Say how much there is; fetch nothing.")
@json_option
@click.argument("wanted", required=False, metavar="[EXP_OR_PATH]", shell_complete=pullable)
@click.argument("destination", required=False, type=FILE, metavar="[DST]")
def pull_command(**params: Any) -> int:
    """Fetch files from all nodes: what a job left, or any path.

    EXP is an experiment (left out, the newest): what its nodes have of its outputs comes into its
    directory here, or with DST into DST/node_<i>_<host>. Any other word is a path on the nodes and
    comes into such directories below DST, or below the current one. A second call fetches only
    what is missing or has changed, and continues files that are half here.
    """
    from orchestrator.head.commands.machines import transfer

    return transfer.pull(transfer.PullOptions(**params))


@command("push")
@reaching
@click.option("--dry-run", is_flag=True, help="Say what would be sent; send nothing.")
@json_option
@click.argument("source", type=FILE, metavar="SRC")
@click.argument("destination", required=False, metavar="[DST]")
def push_command(**params: Any) -> int:
    """Send a directory or a file to all nodes at once.

    DST is the name of the copy on each node, such as /data/set or ~/set; with a / at its end, the
    directory that it is put into; left out, the same as here. Nothing is deleted there. A second
    call sends only what has changed, and continues files that are half there.
    """
    from orchestrator.head.commands.machines import transfer

    return transfer.push(**params)


# -- node ---------------------------------------------------------------------------------------
# `orchestrator node`: which machines jobs may run on.


def cordoned_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a machine that is cordoned."""
    from orchestrator.head.commands.machines import nodes

    return [name for name in nodes.cordoned_names() if name.startswith(incomplete)]


@click.group(cls=Group)
def node() -> None:
    """Keep jobs away from a machine, and let them back."""


@node.command("cordon")
@functools.partial(shared, reads_records=False)
@click.option(
    "--reason", default="", metavar="TEXT", help="Say why: it is shown wherever it counts."
)
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...", shell_complete=node_names)
def cordon_command(where: Where, hosts: tuple[str, ...], reason: str) -> int:
    """Let no further job run on HOST: launches take a spare in its place.

    HOST is a node's name or number in the list. What runs there goes on.
    """
    from orchestrator.head.commands.machines import nodes

    return nodes.cordon(Path(where.node_list), hosts, reason)


@node.command("uncordon")
@functools.partial(shared, reads_records=False)
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...", shell_complete=cordoned_names)
def uncordon_command(where: Where, hosts: tuple[str, ...]) -> int:
    """Let jobs run on HOST again."""
    from orchestrator.head.commands.machines import nodes

    return nodes.uncordon(Path(where.node_list), hosts)


@node.command("list")
@functools.partial(shared, reads_records=False)
@json_option
def list_command(where: Where, as_json: bool) -> int:
    """List the machines that are cordoned, why, since when and by whom.

    All of them, or with --nodes those of that list.
    """
    from orchestrator.head.commands.machines import nodes

    return nodes.show_cordoned(where.nodes, as_json=as_json)
