"""The commands that take what a launch takes: launch itself, and those that look before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.cli.options import DEFAULT_CONFIG, DEFAULT_HOOK, shared


@click.command(
    "launch",
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
)
@shared
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    envvar="CONFIG_FILE",
    help=f"YAML config [default: {DEFAULT_CONFIG} for the engine].",
)
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override one config value.")
@click.option(
    "--env",
    "env",
    multiple=True,
    metavar="K[=V]",
    help="A variable for every rank; without =V it is taken from here.",
)
@click.option("--name", help="experiments/<name>_<time> [default: multinode].")
@click.option(
    "--nproc",
    type=int,
    envvar="NPROC_PER_NODE",
    help="Ranks per node [default: slots= in the list, else the GPUs found, else 1].",
)
@click.option(
    "--master-port", type=int, envvar="MASTER_PORT", help="Default: 29500, or the next free port."
)
@click.option(
    "--start", type=click.Choice(["fork", "plain"]), help="fork is faster, plain is plain."
)
@click.option("--python", help="Python on nodes without python= in the list.")
@click.option("--workdir", help="Directory on the nodes [default: this one].")
@click.option(
    "--hook",
    type=click.Path(),
    help="Shell file whose exports are applied on each node "
    f"[default: {DEFAULT_HOOK} where there is one].",
)
@click.option("--connect-timeout", type=float, help="Seconds to reach a node [default: 10].")
@click.option("--node-loss-timeout", type=float, help="Seconds without a node [default: 60].")
@click.option("--on-node-loss", type=click.Choice(["stop", "wait"]), help="What happens then.")
@click.option(
    "--on-head-loss",
    type=click.Choice(["continue", "stop"]),
    help="What the nodes do when this head is gone for as long [default: continue].",
)
@click.option(
    "--hang-timeout", type=float, help="Seconds without progress before asking why [default: 600]."
)
@click.option("--on-hang", type=click.Choice(["stop", "leave"]), help="What happens then.")
@click.option("--grace", type=float, help="Seconds between asking ranks to stop and killing them.")
@click.option(
    "--check",
    type=click.Choice(["quick", "full", "none"]),
    help="Of the nodes before the start [default: quick].",
)
@click.option("--no-check", "check", flag_value="none", help="The same as --check none.")
@click.option("--strict-host-keys", is_flag=True, default=None, help="Refuse unknown hosts too.")
@click.option(
    "--launcher",
    type=click.Choice(["ssh", "slurm", "accelerate"]),
    help="How nodes are reached [default: slurm in an allocation without a node list]; accelerate:"
    " ranks are started by `accelerate launch`.",
)
@click.option(
    "--accelerate-config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="By accelerate, with this file of its; one for all nodes.",
)
@click.option("--detach", is_flag=True, help="Start it and leave it running.")
@click.option("--dry-run", is_flag=True, help="Print what each node would run; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: as JSON.")
@click.option("--quiet", is_flag=True, help="Show no log lines; they are in the files.")
@click.option("--color/--no-color", default=None, help="Default: colour on a terminal.")
@click.option("-m", "--module", help="Run a module, as python -m does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS...]]")
def launch_command(**options: Any) -> int:
    """Run SCRIPT, or the built-in training engine, on all nodes together.

    Everything behind SCRIPT is handed to it exactly as given. Keys while it runs: d leaves it
    running, Ctrl-C asks it to stop, Ctrl-C again kills it.
    """
    from orchestrator.head.commands import jobs
    from orchestrator.launchers.slurm import allocation

    listed = (
        click.get_current_context().get_parameter_source("nodes") is not ParameterSource.DEFAULT
    )
    given = allocation.chosen(options["launcher"], options["nodes"], listed=listed)
    return jobs.launch(
        options, default_config=DEFAULT_CONFIG, default_hook=DEFAULT_HOOK, allocation=given
    )


NOT_PLANNED = ("launcher", "detach", "dry_run", "as_json", "quiet", "color")
EXAMINED = (
    *("nodes", "ssh_config", "experiments", "config_file", "overrides", "env", "nproc"),
    *("master_port", "start", "python", "workdir", "hook", "connect_timeout"),
    *("strict_host_keys", "module", "program"),
)


@click.command(
    "plan",
    params=[one for one in launch_command.params if one.name not in NOT_PLANNED],
    context_settings=launch_command.context_settings,
)
@click.option("--explain", is_flag=True, help="Every setting of every node: whose it is, and why.")
@click.option("--json", "as_json", is_flag=True)
def plan_command(**options: Any) -> int:
    """Print what a launch would run on each node, or with --explain why; start nothing."""
    from orchestrator.head.commands import jobs

    return jobs.plan_only(options, default_config=DEFAULT_CONFIG, default_hook=DEFAULT_HOOK)


# A verify run is a job: it takes what a launch takes, but runs a program of ours to its end.
LAUNCH_ONLY = (
    *("program", "module", "launcher", "accelerate_config", "detach", "dry_run", "as_json"),
)


@click.command(
    "verify", params=[one for one in launch_command.params if one.name not in LAUNCH_ONLY]
)
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    help="Default: distributed.backend, else nccl where there are GPUs.",
)
@click.option("--max-size", default="1G", show_default=True, help="Of one message: 64M, 1G.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="To measure.")
@click.option("--strict", is_flag=True, help="Exit code 3 if a node, link or device is slow.")
@click.option("--json", "as_json", is_flag=True, help="All of it as JSON.")
def verify_command(**options: Any) -> int:
    """Run real collectives across the nodes: are they right, how fast, and who is slow?

    Then how long a step of the configured model would take with each way of sharding it.
    """
    from orchestrator.head.commands import verify

    return verify.verify(options, default_config=DEFAULT_CONFIG, default_hook=DEFAULT_HOOK)


@click.command("doctor", params=[one for one in launch_command.params if one.name in EXAMINED])
@click.option("--quick", is_flag=True, help="Only what every launch checks.")
@click.option("--fix-hints/--no-fix-hints", "hints", default=True, help="What mends each problem.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--color/--no-color", default=None, help="Default: colour on a terminal.")
def doctor_command(**options: Any) -> int:
    """Examine all nodes, alone and with each other; exit code 3 if a launch would fail.

    With SCRIPT, its copies on the nodes are compared too.
    """
    from orchestrator.head.commands import doctor

    rest = {one.name: None for one in launch_command.params if one.name not in options}
    options = {**rest, **options}
    return doctor.examine(options, default_config=DEFAULT_CONFIG, default_hook=DEFAULT_HOOK)
