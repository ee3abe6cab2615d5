"""The command that runs a program many times, with other values each."""

from __future__ import annotations

from typing import Any

import click

from orchestrator.cli.launch import HELP, PROGRAM, TAKES_PROGRAM
from orchestrator.cli.options import (
    GroupedCommand,
    arguments_from,
    color_option,
    json_option,
    launch_options,
)
from orchestrator.common.errors import UsageError

COMMANDS = (".txt", "-")
COMMAND_FILE = click.File(encoding="utf-8", errors="replace")


@click.command(
    "sweep",
    cls=GroupedCommand,
    params=[*launch_options("launch"), PROGRAM],
    context_settings={**TAKES_PROGRAM, **HELP},
)
@click.option("--grid", multiple=True, metavar="NAME=VALUES...", help="Run all combinations.")
@click.option(
    "--optuna", type=click.IntRange(1), metavar="N", help="Let Optuna choose N members one by one."
)
@click.option(
    "--as",
    "way",
    type=click.Choice(["args", "env", "hydra"]),
    default="args",
    help="Pass a value as --name=value, as a variable, or as name=value. [default: args]",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Run at most N members at once. [default: as many as fit]",
)
@click.option("--metric", default="", metavar="NAME", help="Compare the members by this metric.")
@click.option("--minimize", "best", flag_value="least", default="", help="Lower values are better.")
@click.option("--maximize", "best", flag_value="most", help="Higher values are better.")
@json_option
@color_option
def sweep_command(**params: Any) -> int:
    """Run SCRIPT many times, with different values each.

    --grid lr=1e-4,3e-4 seed=0..3 is a grid; ranges such as 'lr=log(1e-5,1e-2)' and
    'p=uniform(0,0.5)' are for --optuna. {NAME} in the command is replaced by a value. A file has a
    command line for each member (.txt, or - for the standard input). Each member is a launch: on
    one node, in the queue, started again once if it fails, unless options say otherwise. Exit code
    1 if one has failed.
    """
    from orchestrator.head.commands.sweep import space, sweep

    own = {name: params.pop(name) for name in ("grid", "optuna", "way", "jobs", "metric", "best")}
    arguments = arguments_from(params)
    terms = sweep.Terms(
        variables=space.parse_variables(own.pop("grid")),
        **{name: value for name, value in own.items() if value is not None},
    )
    program = arguments.program
    members = None
    if len(program) == 1 and program[0].endswith(COMMANDS) and arguments.module is None:
        if terms.variables:
            raise UsageError("a file of command lines has all values itself", "leave --grid out")
        # Not closed, as it may be the standard input.
        file = COMMAND_FILE.convert(program[0], PROGRAM, None)
        members = space.members_of_lines(file.read())
    return sweep.begin_sweep(arguments, terms, members)
