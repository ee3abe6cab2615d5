"""The front door: commands that parse, call one function, print. Imports wait until needed."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from orchestrator import __version__
from orchestrator.errors import EXIT_USAGE, OrchestratorError, nearest

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no defect of ours, wherever it is met
DEFAULT_CONFIG = "config/multi_node/distributed_two_nodes.yaml"
DEFAULT_HOOK = "scripts/multi_node/config_node.sh"


class Group(click.Group):
    """A group that names the nearest command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            raise click.UsageError(f"no command {args[0]!r}{nearest(args[0], known)}")
        return super().resolve_command(ctx, args)


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


def experiment_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For the shell's completion."""
    root = ctx.params.get("experiments") or Path("experiments")
    found = [path.parent.name for path in Path(root).glob("*/job.json")]
    return sorted(name for name in found if name.startswith(incomplete))


NODE_LIST = click.option(
    "--nodes",
    type=click.Path(path_type=Path),
    default="node_ip_list.txt",
    show_default=True,
    help="The node list; its first node is the master.",
)


def shared(
    function: Callable[..., Any], node_list: Callable[..., Any] = NODE_LIST
) -> Callable[..., Any]:
    """--nodes, --ssh-config, --experiments: the same for every command."""
    path = click.Path(path_type=Path)
    for option in (
        click.option(
            "--experiments",
            type=path,
            default="experiments",
            show_default=True,
            help="Directory of all experiments.",
        ),
        click.option(
            "--ssh-config",
            type=path,
            default=None,
            help="An ssh_config file to use instead of yours.",
        ),
        node_list,
    ):
        function = option(function)
    return function


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Train PyTorch models on machines that you reach only by SSH."""


@cli.command(
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
@click.option("--strict-host-keys", is_flag=True, default=None, help="Refuse unknown hosts too.")
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
    from orchestrator.head import front

    return front.launch(options, default_config=DEFAULT_CONFIG, default_hook=DEFAULT_HOOK)


# A verify run is a job: it takes what a launch takes, but runs a program of ours to its end.
LAUNCH_ONLY = ("program", "module", "detach", "dry_run", "as_json")


@cli.command("verify", params=[one for one in launch_command.params if one.name not in LAUNCH_ONLY])
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
    from orchestrator.head import verify

    return verify.verify(options, default_config=DEFAULT_CONFIG, default_hook=DEFAULT_HOOK)


@cli.command()
@shared
@click.argument("experiment", required=False, shell_complete=experiment_names)
@click.option("--quiet", is_flag=True, help="Show no log lines; they are in the files.")
@click.option("--steal", is_flag=True, help="Take it over from the head that follows it now.")
@click.option("--color/--no-color", default=None)
def attach(**options: Any) -> int:
    """Take a running job up again: its logs, its end, its exit code."""
    from orchestrator.head import front

    return front.attach(options)


@cli.command()
@shared
@click.argument("experiment", required=False, shell_complete=experiment_names)
@click.option("-f", "--follow", is_flag=True, help="Go on as the job goes on.")
@click.option("--node", type=int, help="Only this node.")
@click.option("--rank", type=int, help="Only this rank.")
@click.option("--color/--no-color", default=None)
def logs(**options: Any) -> int:
    """Show the logs of a job: running or finished, started here or elsewhere."""
    from orchestrator.head import front

    return front.logs(options)


@cli.command()
@shared
@click.argument("experiment", required=False, shell_complete=experiment_names)
@click.option("--watch", is_flag=True, help="Again every second, until the job is over.")
@click.option("--json", "as_json", is_flag=True)
def status(**options: Any) -> int:
    """What runs where, as the nodes tell it now."""
    from orchestrator.head import front

    return front.status(options)


@cli.command()
@shared
@click.argument("experiment", required=False, shell_complete=experiment_names)
@click.option("--grace", type=float, default=None, help="Seconds between SIGTERM and SIGKILL.")
@click.option("--now", is_flag=True, help="Kill at once.")
@click.option("--json", "as_json", is_flag=True)
def stop(**options: Any) -> int:
    """End one job on all its nodes."""
    from orchestrator.head import front

    return front.stop(options)


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
    from orchestrator.head import front

    return front.emergency_stop(options)


def checkpoint_places(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """For the shell's completion: experiments, and directories where no name fits."""
    names = experiment_names(ctx, parameter, incomplete)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="dir")]


@cli.group(cls=Group)
def checkpoint() -> None:
    """Saved states: which there are, whether they are sound, their weights as one file.

    EXP_OR_DIR is an experiment (its name or directory), a directory of checkpoints, or one
    checkpoint; left out, the newest experiment that has any.
    """


def checkpoint_argument(**options: Any) -> Callable[..., Any]:
    return click.argument(
        "experiment", metavar="[EXP_OR_DIR]", shell_complete=checkpoint_places, **options
    )


@checkpoint.command("ls")
@shared
@checkpoint_argument(required=False)
@click.option("--json", "as_json", is_flag=True)
def checkpoint_ls(**options: Any) -> int:
    """Which checkpoints there are, the newest first."""
    from orchestrator.head import checkpoint

    return checkpoint.ls(options)


@checkpoint.command("verify")
@shared
@checkpoint_argument(required=False)
@click.option("--json", "as_json", is_flag=True)
def checkpoint_verify(**options: Any) -> int:
    """Compare every byte with its checksum; exit code 1 if any is damaged."""
    from orchestrator.head import checkpoint

    return checkpoint.verify(options)


@checkpoint.command("export")
@shared
@checkpoint_argument(nargs=-1)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Default: the newest that verifies.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: as it was saved."
)
@click.option("--force", is_flag=True, help="Replace OUT.")
def checkpoint_export(**options: Any) -> int:
    """Write the weights of a checkpoint to OUT, one safetensors file."""
    from orchestrator.head import checkpoint

    return checkpoint.export(options)


@cli.command()
@partial(
    shared,
    node_list=click.option(
        "--nodes",
        is_flag=False,
        flag_value="",
        metavar="[FILE]",
        help="The node list, which is not needed here; without FILE: --on-nodes.",
    ),
)
@click.argument("names", nargs=-1, metavar="[NAME...]", shell_complete=experiment_names)
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the newest N.")
@click.option("--older-than", metavar="AGE", help="Of the others, only the older: 14d, 36h, 90m.")
@click.option("--keep-failed", is_flag=True, help="Keep failed and lost ones, too.")
@click.option("--on-nodes", is_flag=True, help="Also remove what these jobs left on their nodes.")
@click.option("--dry-run", is_flag=True, help="Show what would go; remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--pin", is_flag=True, help="NAME... are never to be removed.")
@click.option("--unpin", is_flag=True, help="NAME... may be removed again.")
@click.option("--list", "list_all", is_flag=True, help="All experiments, their sizes and pins.")
@click.option("-v", "--verbose", is_flag=True, help="Name what stays, too, and why.")
@click.option("--json", "as_json", is_flag=True)
def prune(**options: Any) -> int:
    """Remove old experiments: never one that runs, is followed, or is pinned.

    N counts the newest experiments by the time in their names, whatever became of them.
    """
    from orchestrator.head import prune

    return prune.prune(options)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--size", type=click.IntRange(1, 16), default=2, show_default=True, help="Nodes.")
@click.option("--keep", is_flag=True, help="Keep the cluster for your own commands until Ctrl-C.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[LAUNCH-OPTIONS...]")
def demo(size: int, keep: bool, arguments: tuple[str, ...]) -> int:
    """A cluster on this machine, a training run on it, the result.

    What stands behind --size and --keep goes to master_launch.
    """
    from orchestrator import demo as show

    return show.demo(size, keep, arguments)
