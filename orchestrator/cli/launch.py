"""The command that starts a job, and what it shares with those that look before a launch.

`master_launch` imports no other command: to make their options takes 20 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import click

from orchestrator.cli.options import (
    GroupedCommand,
    GroupedOption,
    arguments_from,
    color_option,
    json_option,
    launch_options,
)
from orchestrator.common.version import __version__
from orchestrator.config.launch import OUTPUT, LaunchArguments

TAKES_PROGRAM = {"ignore_unknown_options": False, "allow_interspersed_args": False}
HELP = {"help_option_names": ["-h", "--help"]}
PROGRAM = click.Argument(
    ["program"], nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS...]]"
)


@click.command(
    "launch",
    cls=GroupedCommand,
    params=[*launch_options("launch"), PROGRAM],
    context_settings={**TAKES_PROGRAM, **HELP},
)
@click.version_option(__version__, cls=GroupedOption, group=OUTPUT)
@partial(json_option, group=OUTPUT, help="With --dry-run, print JSON.")
@color_option
def launch_command(**params: Any) -> int:
    """Run SCRIPT, or the built-in engine, on all nodes.

    Arguments after SCRIPT are passed to it unchanged. While it runs, d leaves it running, Ctrl-C
    asks it to stop, and a second Ctrl-C kills it.
    """
    from orchestrator.head.commands import launch

    return launch.launch(arguments_from(params))


def launch_arguments(arguments: Sequence[str]) -> LaunchArguments:
    """Parse what follows `master_launch`; a wrong option is an error here.

    Below a command that passes words on, such as demo, the error shows the usage of that command.
    """
    try:
        with launch_command.make_context("master_launch", list(arguments)) as context:
            return arguments_from(context.params)
    except click.NoSuchOption as error:
        typed = click.get_current_context(silent=True)
        if typed is not None and typed.ignore_unknown_options:
            options = [*typed.command.params, *launch_command.params]
            known = [flag for option in options for flag in option.opts if flag.startswith("--")]
            raise click.NoSuchOption(
                error.option_name,
                possibilities=get_close_matches(error.option_name, known),
                ctx=typed,
            ) from None
        raise
