"""`orchestrator demo`: a cluster on this machine, a training run on it, and its result.

It launches as a user would, with an ssh_config and a node list that lead to SSH servers on
127.0.0.2, .3, ...; the result is read from the experiment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common import interrupt
from orchestrator.common.errors import EXIT_STOPPED, CheckFailed, UsageError
from orchestrator.common.program import how_to_add
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.commands import stop
from orchestrator.head.commands.launch import launch
from orchestrator.head.screen import output
from orchestrator.local_cluster.cluster import LoopbackCluster, sweep
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.curves import POINTS
from orchestrator.records.metrics.curves import curves as curves_of

TORCH = ("torch", "numpy")
CONFIG = Path("config/demo.yaml")
# The number of ranks per node.
SLOTS = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def demo(size: int, keep: bool, words: Sequence[str], arguments: LaunchArguments) -> int:
    """Launch with these options, typed as `words`, on a new cluster; return the exit code."""
    if "python" not in arguments.launch and importlib.util.find_spec("torch") is None:
        what, fix = f"the demo trains with torch, and {sys.executable} has none", how_to_add(*TORCH)
        again = fix.startswith("uvx ") and sys.stdin.isatty()
        if not again or not output.agreed(f"{what}: {fix}\nRun that, which downloads it?"):
            raise CheckFailed(what, fix)
        os.execvp("uvx", shlex.split(fix))
    directory = Path(tempfile.mkdtemp(prefix="orch-demo-"))
    interrupt.before_exit(lambda: remove(directory))
    cluster = LoopbackCluster(size, directory, slots=SLOTS)
    where = replace(arguments.where, nodes=cluster.node_list, ssh_config=cluster.ssh_config)
    config = arguments.config_file or CONFIG
    say(f"starting {size} SSH servers on this machine; each plays a node of {SLOTS} ranks")
    try:
        cluster.start()
        typed = ["--nodes", str(cluster.node_list), "--ssh-config", str(cluster.ssh_config)]
        say(f"master_launch {shlex.join([*typed, '--config', str(config), *words])}")
        code = launch(replace(arguments, where=where, config_file=config))
        experiment = ours(where)
        if experiment is not None:
            show(experiment)
        if keep and code != EXIT_STOPPED:
            output.write_out(invitation(cluster))
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            signal.sigwait(SIGNALS)
    finally:
        # A second Ctrl-C must not cut the clean-up short.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        left = ours(where)
        if left is not None and not left.read_record().over:
            stop.stop(where, left.name, grace=0.0)
        cluster.stop()
        remove(directory)
    return code


def remove(directory: Path) -> None:
    sweep(directory)
    shutil.rmtree(directory, ignore_errors=True)


# -- the result -----------------------------------------------------------------------------------


def show(experiment: Experiment) -> None:
    """Show the job's first and last loss, and what its experiment holds."""
    curves = curves_of(experiment.path / "outputs" / trainers.file_name(0), POINTS)
    if "loss" in curves:
        loss, last = curves["loss"].means, curves["loss"].steps[-1]
        output.write_out(f"\n  loss {loss[0]:.2f} -> {loss[-1]:.2f} in {last} steps\n")
    output.write_out(f"\n  {experiment.path} has job.json, logs, metrics and checkpoints")
    if not experiment.read_record().over:
        say("the job was left running; it is stopped with the demo's cluster")


def ours(where: Where) -> Experiment | None:
    """Return the experiment that was launched on the cluster with this ssh_config."""
    for candidate in reversed(experiments.every(where)):
        with contextlib.suppress(UsageError):
            if candidate.read_record().ssh_config == str(where.ssh_config):
                return candidate
    return None


# -- --keep ---------------------------------------------------------------------------------------


def invitation(cluster: LoopbackCluster) -> str:
    """Return the commands to type in another terminal, in any directory."""
    lines = [
        *(f"export PATH={shlex.quote(str(folder))}:$PATH" for folder in unlisted()),
        f"export ORCHESTRATOR_SSH_CONFIG={shlex.quote(str(cluster.ssh_config))}",
        f"export ORCHESTRATOR_NODES={shlex.quote(str(cluster.node_list))}",
        "master_launch train.py",
        "orchestrator status",
        "emergency_stop",
        f"ssh -F {shlex.quote(str(cluster.ssh_config))} {cluster.addresses[0]}",
    ]
    return (
        f"\nThe {len(cluster.nodes)} nodes stay up. In another terminal, beside your train.py:\n\n"
        + "\n".join(f"    {line}" for line in lines)
        + "\n\nCtrl-C here ends them."
    )


def unlisted() -> list[Path]:
    """Return the directory of this Python's commands, if the shell does not find them by name."""
    command = Path(sys.executable).with_name("master_launch")
    found = shutil.which(command.name)
    return [command.parent] if command.exists() and found != str(command) else []


def say(text: str) -> None:
    output.write_out(f"demo: {text}")
