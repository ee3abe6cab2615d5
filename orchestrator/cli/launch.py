"""The command that starts a job, and what it shares with those that look before a launch.

`master_launch` imports no other command: to make their options takes 20 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.options import (
    Command,
    GroupedCommand,
    GroupedOption,
    arguments_from,
    color_option,
    launch_options,
)
from orchestrator.common.errors import EXIT_DONE
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
