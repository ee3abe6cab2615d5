"""All commands: each parses its options and calls one function. Imports wait until needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from orchestrator.cli.chores import (
    bootstrap_command,
    doctor_command,
    exec_command,
    init_command,
    nodes_command,
    plan_command,
    pull_command,
    push_command,
    run_node,
    ssh_command,
    submit,
    verify_command,
)
from orchestrator.cli.launch import launch_arguments, launch_command
from orchestrator.cli.options import (
    Group,
    Seconds,
    asking,
    color_option,
    experiment_names,
    json_option,
    shared_options,
)
from orchestrator.cli.records import (
    checkpoint,
    dashboard,
    profile,
    prune,
    report,
    rerun,
    track,
)
from orchestrator.cli.sweep import sweep_command
from orchestrator.common.errors import UsageError
from orchestrator.common.version import __version__
from orchestrator.common.wings import import_view
from orchestrator.config.launch import View, Where

__all__ = ["cli", "emergency_stop_command", "launch_command"]

HEADINGS = {
    "Run a job": (
        *("launch", "sweep", "rerun", "attach", "logs", "ls", "status", "stop"),
        "emergency-stop",
    ),
    "Look before a launch": ("demo", "init", "nodes", "plan", "doctor", "verify", "top"),
    "Everyday work on all nodes": (
        "exec",
        "ssh",
        "push",
        "pull",
        "bootstrap",
    ),
    "What jobs leave": (
        *("dashboard", "report", "profile", "track", "checkpoint"),
        "prune",
    ),
    "Other launchers": ("run-node", "submit"),
    "Help": ("help",),
}


@click.group(cls=Group, headings=HEADINGS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Train PyTorch models on machines that you reach only by SSH."""


def experiment_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument(
        "experiment", metavar="[EXP]", required=False, shell_complete=experiment_names
    )(function)


@cli.command()
@asking
@experiment_argument
@click.option("--quiet", is_flag=True, help="Show no log lines; the files have them.")
@click.option("--steal", is_flag=True, help="Take the job over from the process that follows it.")
@color_option
def attach(where: Where, experiment: str | None, quiet: bool, steal: bool) -> int:
    """Follow a running job again: its logs, its end and exit code."""
    from orchestrator.head.commands import follow

    return follow.attach_to_job(where, experiment, View(quiet=quiet), steal=steal)


@cli.command()
@shared_options
@experiment_argument
@click.option("-f", "--follow", is_flag=True, help="Keep showing lines until the job is over.")
@click.option(
    "-n",
    "--tail",
    "last",
    type=click.IntRange(min=0),
    metavar="LINES",
    help="Begin with the last lines of each node, or of the rank.",
)
@click.option("--node", type=int, help="Show this node only.")
@click.option("--rank", type=int, help="Show this rank only.")
@click.option("--system", is_flag=True, help="Show what the head and the nodes did, not the ranks.")
@color_option
def logs(
    where: Where,
    experiment: str | None,
    follow: bool,
    last: int | None,
    node: int | None,
    rank: int | None,
    system: bool,
) -> int:
    """Show the logs of a job, running or finished."""
    from orchestrator.head.commands import logs

    if system and (follow or rank is not None):
        raise UsageError("--system takes neither -f nor --rank", "use it with --node and -n")
    if system:
        return logs.show_system(where, experiment, node, last)

    return logs.show_logs(where, experiment, View(node=node, rank=rank), follow=follow, last=last)


@cli.command()
@asking
@click.option("--once", is_flag=True, help="Print one sample and exit.")
@click.option("--watch", is_flag=True, help="With --json, print a line for each sample.")
@click.option(
    "--every",
    "seconds",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    help="Seconds between two samples. [default: 2]",
)
@json_option
def top(where: Where, once: bool, watch: bool, seconds: float) -> int:
    """Show all nodes live: who uses them, how far each job is.

    r shows a job's ranks, and of each its log and its stack; l shows a job's log, e what happened,
    s ends it (asks), q quits and leaves everything running. Without a terminal, one sample is
    printed. Exit code 4 if a node cannot be reached.
    """
    return int(import_view("top").top(where, once=once, again=watch, seconds=seconds))


@cli.command()
@shared_options
@click.option("--running", is_flag=True, help="List only jobs that run, or wait in Slurm.")
@click.option("--all", "every", is_flag=True, help="List all jobs, not only the newest 20.")
@click.option("--tag", "tags", multiple=True, metavar="WORD", help="List only jobs with this tag.")
@json_option
@color_option
def ls(where: Where, running: bool, every: bool, tags: tuple[str, ...]) -> int:
    """List the jobs of this directory: step, loss, time left."""
    from orchestrator.head.commands import ls

    return ls.list_jobs(where, running=running, every=every, tags=tags)


@cli.command()
@asking
@experiment_argument
@click.option("--watch", is_flag=True, help="Show its ranks live until it is over.")
@json_option
@color_option
def status(where: Where, experiment: str | None, watch: bool) -> int:
    """Show how far a job is, and what its nodes say runs there."""
    from orchestrator.head.status import status

    return status.status_command(where, experiment, watch=watch)


@cli.command()
@asking
@experiment_argument
@click.option(
    "--grace",
    type=Seconds(),
    metavar="SECONDS",
    help="Seconds that ranks have to save and exit before they are killed. [default: the launch's]",
)
@click.option("--now", is_flag=True, help="Kill the ranks at once.")
@json_option
def stop(where: Where, experiment: str | None, grace: float | None, now: bool) -> int:
    """Stop a job on all its nodes, or all members of a sweep."""
    from orchestrator.head.commands import stop
    from orchestrator.head.commands.sweep import journal, sweep

    if experiment and (found := journal.find_journal(where.experiments, experiment)):
        return sweep.stop_sweep(where, found, 0.0 if now else grace)

    return stop.stop_job(where, experiment, grace=0.0 if now else grace)


@cli.command("emergency-stop")
@functools.partial(asking, reads_records=False)
@click.option(
    "--mine/--all-users",
    "mine",
    default=True,
    help="Kill your jobs [default], or, as root on the nodes, everyone's.",
)
@click.option("--yes", is_flag=True, help="Do not show the jobs and ask first.")
@click.option("--dry-run", is_flag=True, help="Show what would be ended, and end nothing.")
@json_option
def emergency_stop_command(where: Where, mine: bool, yes: bool, dry_run: bool) -> int:
    """Kill every job of yours on every node of the list, now."""
    from orchestrator.head.commands import stop

    return stop.emergency_stop(where, all_users=not mine, yes=yes, dry_run=dry_run)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--size", type=click.IntRange(1, 16), default=2, show_default=True, help="Number of nodes."
)
@click.option("--keep", is_flag=True, help="Keep the cluster for your own commands until Ctrl-C.")
@click.option("--kill", is_flag=True, help="Kill a rank and then a node while it trains.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[LAUNCH-OPTIONS...]")
def demo(size: int, keep: bool, kill: bool, arguments: tuple[str, ...]) -> int:
    """Create a cluster on this machine, and train on it.

    LAUNCH-OPTIONS are those of master_launch.
    """
    from orchestrator.local_cluster import demo

    words = (*demo.WITH_FAULTS, *arguments) if kill else arguments
    # A wrong option is refused before anything is started.
    return demo.run_demo(size, keep, kill, words, launch_arguments(words))


@cli.command("help")
@click.argument("words", nargs=-1, metavar="[TOPIC | WORD...]")
@click.pass_context
def help_command(context: click.Context, words: tuple[str, ...]) -> int:
    """Explain a topic, a page of the guide or a command.

    Other words are looked for in topics, guide and options. Without any, topics and pages are
    listed.
    """
    from orchestrator.cli import help as pages

    command = cli.get_command(context, words[0]) if len(words) == 1 else None
    if command is not None:
        inner = command.make_context(f"orchestrator {words[0]}", [], resilient_parsing=True)
        return pages.show_text(command.get_help(inner))
    options = {"/".join(o.opts): getattr(o, "help", "") or "" for o in launch_command.params}
    return pages.show_text(pages.explain_topic(words, options) if words else pages.list_topics())


for command in (
    launch_command,
    sweep_command,
    rerun,
    init_command,
    nodes_command,
    plan_command,
    doctor_command,
    verify_command,
    exec_command,
    ssh_command,
    push_command,
    pull_command,
    bootstrap_command,
    dashboard,
    report,
    profile,
    track,
    checkpoint,
    prune,
    submit,
    run_node,
):
    cli.add_command(command)
