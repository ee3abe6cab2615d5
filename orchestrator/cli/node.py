"""`orchestrator node`: which machines jobs may run on."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from orchestrator.cli.chores import node_names
from orchestrator.cli.options import Group, shared
from orchestrator.config.launch import Where

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def cordoned_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a machine that is cordoned."""
    from orchestrator.head.commands import cordon

    return [name for name in cordon.names() if name.startswith(incomplete)]


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
    from orchestrator.head.commands import cordon

    return cordon.cordon(Path(where.node_list), hosts, reason)


@node.command("uncordon")
@functools.partial(shared, reads_records=False)
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...", shell_complete=cordoned_names)
def uncordon_command(where: Where, hosts: tuple[str, ...]) -> int:
    """Let jobs run on HOST again."""
    from orchestrator.head.commands import cordon

    return cordon.uncordon(Path(where.node_list), hosts)


@node.command("list")
@functools.partial(shared, reads_records=False)
@json_option
def list_command(where: Where, as_json: bool) -> int:
    """List the machines that are cordoned, why, since when and by whom.

    All of them, or with --nodes those of that list.
    """
    from orchestrator.head.commands import cordon

    return cordon.show(where.nodes, as_json=as_json)
