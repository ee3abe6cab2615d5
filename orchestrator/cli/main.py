"""The front door: commands that parse, call one function, print. Imports wait until needed."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, NoReturn

import click

from orchestrator.cli import launchers
from orchestrator.cli.launch import doctor_command, launch_command, plan_command, verify_command
from orchestrator.cli.options import Group, experiment_names, shared
from orchestrator.cli.records import checkpoint, prune
from orchestrator.errors import EXIT_USAGE, OrchestratorError
from orchestrator.version import __version__

__all__ = ["cli", "emergency_stop_command", "launch_command", "run"]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no defect of ours, wherever it is met


def run(command: click.Command, name: str) -> NoReturn:
    """Run a command; every error ends here, in words and with its exit code."""
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except OrchestratorError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except click.exceptions.Exit as leaving:
        code = leaving.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {where}{error.strerror}", err=True)
        code = EXIT_USAGE
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # Threads that still wait for a dead node must not hold the exit.
    os._exit(code if isinstance(code, int) else 0)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Train PyTorch models on machines that you reach only by SSH."""


@cli.command()
@shared
@click.argument("experiment", required=False, shell_complete=experiment_names)
@click.option("--quiet", is_flag=True, help="Show no log lines; they are in the files.")
@click.option("--steal", is_flag=True, help="Take it over from the head that follows it now.")
@click.option("--color/--no-color", default=None)
def attach(**options: Any) -> int:
    """Take a running job up again: its logs, its end, its exit code."""
    from orchestrator.head.commands import jobs

    return jobs.attach(options)


@cli.command()
@shared
@click.argument("experiment", required=False, shell_complete=experiment_names)
@click.option("-f", "--follow", is_flag=True, help="Go on as the job goes on.")
@click.option("--node", type=int, help="Only this node.")
@click.option("--rank", type=int, help="Only this rank.")
@click.option("--color/--no-color", default=None)
def logs(**options: Any) -> int:
    """Show the logs of a job: running or finished, started here or elsewhere."""
    from orchestrator.head.commands import jobs

    return jobs.logs(options)


@cli.command()
@shared
@click.argument("experiment", required=False, shell_complete=experiment_names)
@click.option("--watch", is_flag=True, help="Again every second, until the job is over.")
@click.option("--json", "as_json", is_flag=True)
def status(**options: Any) -> int:
    """What runs where, as the nodes tell it now."""
    from orchestrator.head.commands import jobs

    return jobs.status(options)


@cli.command()
@shared
@click.argument("experiment", required=False, shell_complete=experiment_names)
@click.option("--grace", type=float, default=None, help="Seconds between SIGTERM and SIGKILL.")
@click.option("--now", is_flag=True, help="Kill at once.")
@click.option("--json", "as_json", is_flag=True)
def stop(**options: Any) -> int:
    """End one job on all its nodes."""
    from orchestrator.head.commands import jobs

    return jobs.stop(options)


@cli.command("emergency-stop")
@shared
@click.option(
    "--mine/--all-users",
    "mine",
    default=True,
    help="Yours [default], or, as root there, everyone's.",
)
@click.option("--json", "as_json", is_flag=True)
def emergency_stop_command(**options: Any) -> int:
    """Kill every job of ours on every node of the list, now."""
    from orchestrator.head.commands import jobs

    return jobs.emergency_stop(options)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--size", type=click.IntRange(1, 16), default=2, show_default=True, help="Nodes.")
@click.option("--keep", is_flag=True, help="Keep the cluster for your own commands until Ctrl-C.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[LAUNCH-OPTIONS...]")
def demo(size: int, keep: bool, arguments: tuple[str, ...]) -> int:
    """A cluster on this machine, a training run on it, the result.

    What stands behind --size and --keep goes to master_launch.
    """
    from orchestrator.local_cluster import demo as show

    # A wrong option is refused before anything is started.
    options = launch_command.make_context("master_launch", list(arguments)).params
    return show.demo(size, keep, arguments, options)


for command in (launch_command, plan_command, doctor_command, verify_command, checkpoint, prune):
    cli.add_command(command)
for door in (*launchers.groups(Group), launchers.run_node):
    cli.add_command(door)
