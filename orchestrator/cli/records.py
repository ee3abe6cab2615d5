"""The commands on what jobs leave: checkpoints and experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from orchestrator.cli.options import (
    FilePath,
    asking,
    command,
    experiment_names,
    json_option,
    shared_options,
)
from orchestrator.common.wings import import_view
from orchestrator.config.launch import Where
from orchestrator.trackers.known import KNOWN


def places(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an experiment's name, or a directory where no name fits."""
    names = experiment_names(ctx, parameter, incomplete)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="dir")]


@command()
@shared_options
@click.argument("experiment", metavar="[EXP]", required=False, shell_complete=experiment_names)
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Set a variable, or change it.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one setting of its config.",
)
@click.option("--detach", is_flag=True, help="Start the job and leave it running.")
def rerun(where: Where, experiment: str | None, **changes: Any) -> int:
    """Launch an experiment again: its code, config, command line.

    The code is that of the experiment, even if the directory has changed since.
    """
    from orchestrator.cli.launch import launch_arguments
    from orchestrator.head.commands import rerun

    return rerun.rerun_experiment(where, experiment, launch_arguments, **changes)


@command()
@shared_options
@click.argument("action", type=click.Choice(["ls", "verify", "export"]))
@click.argument("names", metavar="[EXP_OR_DIR] [OUT]", nargs=-1, shell_complete=places)
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
@click.option("--ema", is_flag=True, help="Export the average of the weights, if one was kept.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@json_option
def checkpoint(where: Where, action: str, names: tuple[str, ...], **options: Any) -> int:
    """List saved states, verify them, or export weights.

    EXP_OR_DIR is an experiment (its name or directory), a directory of checkpoints, or one
    checkpoint; left out, the newest experiment that has any. verify compares every byte with its
    checksum: exit code 1 if any is damaged. export writes the weights to OUT, a safetensors file.
    """
    from orchestrator.head.commands import checkpoints

    *sources, out = names if action == "export" and names else (*names, "")
    if len(sources) > 1 or (action == "export" and not out):
        raise click.UsageError("checkpoint takes [EXP_OR_DIR], and export also OUT")
    source = sources[0] if sources else None
    if action == "export":
        return checkpoints.export_weights(where, source, Path(out), **options)
    return (checkpoints.list_checkpoints if action == "ls" else checkpoints.verify_checkpoints)(
        where, source
    )


@command()
@shared_options
@click.argument("names", metavar="[EXP]...", nargs=-1, shell_complete=experiment_names)
@click.option(
    "--out",
    type=FilePath(path_type=Path, dir_okay=False),
    help="Write the page here. [default: report.html in the experiment's directory]",
)
@click.option("--open", "opened", is_flag=True, help="Open it in the browser of this machine.")
def report(where: Where, names: tuple[str, ...], out: Path | None, opened: bool) -> int:
    """Write one HTML page of experiments, or of a sweep.

    The page has curves, a map of all ranks, events, nodes, the config and the last lines of the
    logs. It is one file that needs no other.
    """
    return int(import_view("report").report(where, names, out=out, opened=opened))


@command()
@shared_options
@click.argument("experiment", metavar="[EXP]", required=False, shell_complete=experiment_names)
@click.option(
    "--to",
    "names",
    multiple=True,
    metavar="TRACKER",
    shell_complete=lambda *_: [CompletionItem(name) for name in KNOWN],
    help=f"Send the metrics to {', '.join(KNOWN)}; may be repeated.",
)
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="TRACKER.OPTION=VALUE",
    help="Pass an option to the tracker: wandb.project=p.",
)
@click.option(
    "--serve",
    metavar="[HOST:]PORT",
    help="Serve the state of all jobs to Prometheus, until Ctrl-C. [default HOST: 127.0.0.1]",
)
@click.option(
    "--token-file",
    type=FilePath(path_type=Path, dir_okay=False),
    help="With --serve, answer only clients that send the token in this file.",
)
def track(
    where: Where,
    experiment: str | None,
    names: tuple[str, ...],
    options: tuple[str, ...],
    serve: str | None,
    token_file: Path | None,
) -> int:
    """Send the metrics of a job to a tracker, or serve them.

    The tracker gets two runs: the metrics of rank 0 by step, and those of the nodes by seconds
    since the start. Nodes need no internet access. A second call continues where the first
    stopped; a finished job can be sent as well. config/grafana/orchestrator.json is a Grafana
    dashboard for --serve.
    """
    if bool(names) == bool(serve):
        raise click.UsageError("name a tracker with --to, or a port with --serve")
    track = import_view("track")
    if serve:
        host, _, port = serve.rpartition(":")
        return int(
            track.metrics(where, host or "127.0.0.1", click.IntRange(0, 65535)(port), token_file)
        )
    return int(track.track(where, experiment, names, options))


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
    "--name",
    "names",
    multiple=True,
    help="Another name of this machine in the addresses of browsers.",
)
@click.option("--open", "opened", is_flag=True, help="Open it in the browser of this machine.")
def dashboard(
    where: Where, host: str, port: int | None, names: tuple[str, ...], opened: bool
) -> int:
    """Show all experiments live in a browser, until Ctrl-C.

    It shows progress, the page of `report` for each experiment and for several side by side, and
    a button that stops a job. Anyone who has the printed address, with its token, can do all that.
    """
    return int(import_view("dashboard").dashboard(where, host, port, names, opened=opened))


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
    help="Give up if a running job has written no traces by then. [default: 180]",
)
@json_option
def profile(where: Where, experiment: str | None, steps: int, timeout: float) -> int:
    """Show where the time of a job's steps goes.

    All ranks of a running job trace the same steps, and continue. Of a job that is over, the
    existing traces are read; EXP_OR_DIR may also be a directory of torch.profiler's traces. One
    trace of all ranks for ui.perfetto.dev is written beside them.
    """
    return int(import_view("profile").profile(where, experiment, steps, timeout))


@command()
@shared_options
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the newest N.")
@click.option(
    "--older-than",
    metavar="AGE",
    help="Of the others, remove only those older than AGE: 14d, 36h, 90m.",
)
@click.option("--keep-failed", is_flag=True, help="Also keep failed and lost ones.")
@click.option("--on-nodes", is_flag=True, help="Also remove what these jobs left on their nodes.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def prune(where: Where, **options: Any) -> int:
    """Remove old experiments, but none that runs or is pinned.

    N counts the newest experiments by the time in their names, in any state. One with a file .pin
    is pinned.
    """
    from orchestrator.head.commands import prune

    return prune.prune_experiments(where, **options)
