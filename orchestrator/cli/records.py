"""The commands on what jobs leave: checkpoints and experiments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from orchestrator.cli.options import (
    FILE,
    FilePath,
    Group,
    asking,
    color_option,
    command,
    experiment_names,
    json_option,
    shared,
)
from orchestrator.common.wings import view
from orchestrator.config.launch import Where
from orchestrator.trackers.known import KNOWN

ALONE = "--on-nodes"  # what --nodes means without a FILE after it


def places(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an experiment's name, or a directory where no name fits."""
    names = experiment_names(ctx, parameter, incomplete)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="dir")]


@command()
@shared
@click.argument("experiment", metavar="[EXP]", required=False, shell_complete=experiment_names)
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Set a variable, or change it.")
@click.option(
    "--env-file",
    multiple=True,
    metavar="FILE",
    help="Read variables from this file, in place of those of the launch.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting of it."
)
@click.option("--detach", is_flag=True, help="Start the job and leave it running.")
def rerun(
    where: Where,
    experiment: str | None,
    env: tuple[str, ...],
    env_file: tuple[str, ...],
    overrides: tuple[str, ...],
    detach: bool,
) -> int:
    """Launch an experiment again: its code, config, command line.

    The code is that of the experiment, whatever the directory holds now.
    """
    from orchestrator.cli.launch import launch_arguments
    from orchestrator.head.commands import rerun

    again = rerun.Again(env, env_file, overrides, detach)
    return rerun.rerun(where, experiment, again, launch_arguments)


@click.group(cls=Group)
def checkpoint() -> None:
    """List saved states, verify them, or export their weights.

    EXP_OR_DIR is an experiment (its name or directory), a directory of checkpoints, or one
    checkpoint; left out, the newest experiment that has any.
    """


def checkpoint_argument(**options: Any) -> Callable[..., Any]:
    return click.argument("experiment", metavar="[EXP_OR_DIR]", shell_complete=places, **options)


@checkpoint.command("ls")
@shared
@checkpoint_argument(required=False)
@json_option
def checkpoint_ls(where: Where, experiment: str | None) -> int:
    """List the checkpoints, the newest first."""
    from orchestrator.head.commands.kept import checkpoints

    return checkpoints.ls(where, experiment)


@checkpoint.command("verify")
@shared
@checkpoint_argument(required=False)
@json_option
def checkpoint_verify(where: Where, experiment: str | None) -> int:
    """Compare every byte with its checksum; exit code 1 if any is damaged."""
    from orchestrator.head.commands.kept import checkpoints

    return checkpoints.verify(where, experiment)


@checkpoint.command("export")
@shared
@checkpoint_argument(nargs=-1)
@click.argument("out", type=FILE)
@click.option("--step", type=int, help="Export this step. [default: the newest that verifies]")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Convert the weights. [default: as they were saved]",
)
@click.option(
    "--layout",
    type=click.Choice(["file", "huggingface"]),
    default="file",
    help="OUT is one file, or a directory for from_pretrained. [default: file]",
)
@click.option("--ema", is_flag=True, help="The average of the weights, where one was kept.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def checkpoint_export(where: Where, **options: Any) -> int:
    """Write the weights of a checkpoint to OUT: a safetensors file, or a directory of them."""
    from orchestrator.head.commands.kept import checkpoints

    return checkpoints.export(where, **options)


@command()
@shared
@click.argument("names", metavar="[EXP]...", nargs=-1, shell_complete=experiment_names)
@click.option(
    "--out",
    type=FilePath(path_type=Path, dir_okay=False),
    help="Write the page here. [default: report.html in the experiment's directory]",
)
@click.option("--open", "opened", is_flag=True, help="Open it in the browser of this machine.")
@click.option(
    "--scaling", is_flag=True, help="Compare runs of different sizes with the smallest of them."
)
def report(
    where: Where, names: tuple[str, ...], out: Path | None, opened: bool, scaling: bool
) -> int:
    """Write one HTML page of experiments, or of a sweep.

    Curves, a map of all ranks, what happened, nodes, config, the last lines of the logs. It
    needs nothing else and can be sent to anybody.
    """
    report = view("report")
    code: int = report.report(where, names, out=out, opened=opened, scaling=scaling)
    return code


@command()
@shared
@click.argument("experiment", metavar="[EXP]", required=False, shell_complete=experiment_names)
@click.option(
    "--to",
    "names",
    multiple=True,
    required=True,
    metavar="TRACKER",
    shell_complete=lambda *_: [CompletionItem(name) for name in KNOWN],
    help=f"Send the numbers to {', '.join(KNOWN)}; may be repeated.",
)
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="TRACKER.OPTION=VALUE",
    help="What its init takes, such as wandb.project=p.",
)
def track(
    where: Where, experiment: str | None, names: tuple[str, ...], options: tuple[str, ...]
) -> int:
    """Pass the numbers of a job on to a tracker, until it is over.

    What rank 0 measures, by its steps, and what each node measures of itself, by seconds since
    the start: two runs there. Any script's nodes are measured. Nodes need no internet for it.
    Called again, it goes on where it was; a job that is over is passed on, too.
    """
    track = view("track")
    code: int = track.track(where, experiment, names, options)
    return code


@command()
@shared
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9400,
    help="Listen at this port; 0 is a free one. [default: 9400]",
)
@click.option("--host", default="127.0.0.1", help="Listen at this address. [default: 127.0.0.1]")
@click.option(
    "--token-file",
    type=FilePath(path_type=Path, dir_okay=False),
    help="Answer only those who send the word in this file.",
)
def metrics(where: Where, port: int, host: str, token_file: Path | None) -> int:
    """Serve the state of all jobs to Prometheus, until Ctrl-C.

    Steps, losses and times of all ranks, and what each node measures of itself.
    config/grafana/orchestrator.json shows them in Grafana.
    """
    track = view("track")
    code: int = track.metrics(where, host, port, token_file)
    return code


@command()
@asking
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Listen on this address of this machine; 0.0.0.0 is all of them.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Listen on this port. [default: 8321, or any]"
)
@click.option(
    "--name", "names", multiple=True, help="A name by which browsers call this machine, too."
)
@click.option("--open", "opened", is_flag=True, help="Open it in the browser of this machine.")
def dashboard(
    where: Where, host: str, port: int | None, names: tuple[str, ...], opened: bool
) -> int:
    """Show all experiments live in a browser, until Ctrl-C.

    How far each is, its curves, its logs and their search, several side by side, and a stop that
    asks. The address that is printed has a token: whoever has it sees and may do all that.
    """
    dashboard = view("dashboard")
    code: int = dashboard.dashboard(where, host, port, names, opened=opened)
    return code


@command()
@asking
@click.argument("experiment", metavar="[EXP_OR_DIR]", required=False, shell_complete=places)
@click.option(
    "--steps",
    type=click.IntRange(1, 20),
    default=3,
    help="Trace this many steps of a running job. [default: 3]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 86400),
    default=180.0,
    metavar="SECONDS",
    help="Give up when a running job has written no traces by then. [default: 180]",
)
@json_option
def profile(where: Where, experiment: str | None, steps: int, timeout: float) -> int:
    """Show what the steps of a job go into.

    A running job is asked: all its ranks trace the same steps, and go on. Of one that is over, the
    traces that it left are read; EXP_OR_DIR may also be a directory of torch.profiler's traces.
    Beside them comes one trace of all ranks for ui.perfetto.dev.
    """
    code: int = view("profile").profile(where, experiment, steps, timeout)
    return code


@command()
@shared
@click.argument("experiment", metavar="[EXP]", required=False, shell_complete=experiment_names)
@click.option("--note", metavar="TEXT", help="What the run is for; an empty text takes it away.")
@click.option("--tag", "tags", multiple=True, metavar="WORD", help="Add a tag.")
@click.option("--untag", "without", multiple=True, metavar="WORD", help="Take a tag away.")
@json_option
def label(
    where: Where,
    experiment: str | None,
    note: str | None,
    tags: tuple[str, ...],
    without: tuple[str, ...],
) -> int:
    """Note what an experiment is for, and tag it.

    Without an option, both are shown.
    """
    from orchestrator.head.commands import ls

    return ls.label(where, experiment, note=note, tags=tags, without=without)


@command()
@shared
@click.argument("first", metavar="EXP1", shell_complete=experiment_names)
@click.argument("second", metavar="EXP2", shell_complete=experiment_names)
@json_option
@color_option
def diff(where: Where, first: str, second: str) -> int:
    """Show what differs between two experiments.

    Code, config, versions, nodes and results are compared.
    """
    from orchestrator.head.commands import diff

    return diff.diff(where, first, second)


@command()
@partial(
    shared,
    node_list=click.Option(
        ["--nodes"],
        type=FILE,
        is_flag=False,
        flag_value=ALONE,
        metavar="[FILE]",
        help="Without FILE, the same as --on-nodes. A node list is not needed here.",
    ),
)
@click.argument("names", nargs=-1, metavar="[NAME...]", shell_complete=experiment_names)
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the newest N.")
@click.option(
    "--older-than",
    metavar="AGE",
    help="Of the others, remove only those older than AGE: 14d, 36h, 90m.",
)
@click.option("--keep-failed", is_flag=True, help="Keep failed and lost ones too.")
@click.option("--on-nodes", is_flag=True, help="Also remove what these jobs left on their nodes.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--pin", is_flag=True, help="Never remove these.")
@click.option("--unpin", is_flag=True, help="Allow these to be removed again.")
@click.option(
    "--list", "list_all", is_flag=True, help="List all experiments with their sizes and pins."
)
@click.option("-v", "--verbose", is_flag=True, help="Also name what stays, and why.")
@json_option
def prune(where: Where, **options: Any) -> int:
    """Remove old experiments: never one that runs or is pinned.

    N counts the newest experiments by the time in their names, whatever became of them.
    """
    from orchestrator.head.commands.kept import prune

    options["on_nodes"] |= where.nodes == Path(ALONE)
    return prune.prune(prune.PruneOptions(where=where, **options))
