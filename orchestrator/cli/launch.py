"""The command that starts a job, and what it shares with those that look before a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from orchestrator.cli.options import GroupedCommand, GroupedOption, arguments_from, launch_options
from orchestrator.config.launch import NODES, LaunchArguments

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
    kinds = click.Choice(["ssh", "slurm", "accelerate"])
    launcher = click.Option(["--launcher"], type=kinds, multiple=True, hidden=True)
    return [no_check, launcher]


@click.command(
    "launch",
    cls=GroupedCommand,
    params=[*launch_options("launch"), *aliases(), PROGRAM],
    context_settings={**TAKES_PROGRAM, **HELP},
)
def launch_command(**params: Any) -> int:
    """Run SCRIPT on all nodes together; without SCRIPT, the built-in training engine.

    Arguments after SCRIPT are passed to it unchanged. While it runs, d leaves it running, Ctrl-C
    asks it to stop, and a second Ctrl-C kills it.
    """
    from orchestrator.head.commands import launch

    arguments = arguments_from(params)
    return launch.launch(arguments)


def launch_arguments(arguments: Sequence[str]) -> LaunchArguments:
    """Parse what follows `master_launch`; a wrong option is an error here."""
    with launch_command.make_context("master_launch", list(arguments)) as context:
        return arguments_from(context.params)
