"""`orchestrator demo`: a cluster on this machine, a training run on it, and its result.

It runs `master_launch` as a user would, in a process of its own, with an ssh_config and a node
list that lead to SSH servers on 127.0.0.2, .3, ...; the result is read from the experiment.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from orchestrator.common import interrupt
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.screen import output
from orchestrator.local_cluster.cluster import LoopbackCluster, sweep
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.curves import POINTS
from orchestrator.records.metrics.curves import curves as curves_of

CONFIG = Path("config/demo.yaml")
# The number of ranks per node.
SLOTS = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def demo(size: int, keep: bool, options: tuple[str, ...], arguments: LaunchArguments) -> int:
    """Launch with these options, parsed as `arguments`, on a new cluster; return the exit code."""
    if "python" not in arguments.launch and importlib.util.find_spec("torch") is None:
        raise CheckFailed(
            f"the demo trains with torch, and {sys.executable} has none",
            f"type: {shlex.quote(sys.executable)} -m pip install torch==2.13.0 numpy",
        )
    cluster = LoopbackCluster(size, make_directory(), slots=SLOTS)
    try:
        say(f"starting {size} SSH servers on this machine; each plays a node of {SLOTS} ranks")
        cluster.start()
        code, told_to_end = launch(cluster, options)
        if not arguments.dry_run:
            show(cluster, arguments.where.experiments)
        if keep and not told_to_end:
            output.write_out(invitation(cluster))
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            signal.sigwait(SIGNALS)
    finally:
        # A second Ctrl-C must not cut the clean-up short.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if not arguments.dry_run:
            stop_job(cluster, arguments.where.experiments)
        cluster.stop()
        remove(cluster.directory)
    return code


# -- the cluster and the launch -------------------------------------------------------------------


def make_directory() -> Path:
    """Create a directory for keys, logs and homes; the end or Ctrl-C removes it."""
    interrupt.hold()
    directory = Path(tempfile.mkdtemp(prefix="orch-demo-"))
    interrupt.undo_with(lambda: remove(directory))
    interrupt.answer_now()
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    return directory


def remove(directory: Path) -> None:
    sweep(directory)
    shutil.rmtree(directory, ignore_errors=True)


def launch(cluster: LoopbackCluster, arguments: Sequence[str]) -> tuple[int, bool]:
    """Run master_launch and wait for it; return its exit code, and whether a signal ended us."""
    options = ["--nodes", str(cluster.node_list), "--ssh-config", str(cluster.ssh_config)]
    options += ["--config", str(CONFIG), *arguments]
    say("master_launch " + shlex.join(options))
    jobs: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        for job in jobs:
            job.terminate()

    # Ctrl-C in a terminal reaches the launch without us, and it knows what to do.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    jobs.append(subprocess.Popen([sys.executable, "-m", "orchestrator", "launch", *options]))
    if received:
        jobs[0].terminate()
    code = jobs[0].wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return code if code >= 0 else 128 - code, bool(received)


def stop_job(cluster: LoopbackCluster, root: Path) -> None:
    """Stop a job that was left running, so that its background head ends as well."""
    experiment = ours(cluster, root)
    if experiment is not None and not experiment.read_record().over:
        command = [sys.executable, "-m", "orchestrator", "stop", experiment.name, "--grace", "0"]
        subprocess.run([*command, "--experiments", str(root)], check=False)


# -- the result -----------------------------------------------------------------------------------


def show(cluster: LoopbackCluster, root: Path) -> None:
    """Show the job's first and last loss, and what its experiment holds."""
    experiment = ours(cluster, root)
    if experiment is None:
        # The launch failed before it had an experiment, and has reported the reason.
        return
    curves = curves_of(experiment.path / "outputs" / trainers.file_name(0), POINTS)
    if "loss" in curves:
        loss, last = curves["loss"].means, curves["loss"].steps[-1]
        output.write_out(f"\n  loss {loss[0]:.2f} -> {loss[-1]:.2f} in {last} steps\n")
    output.write_out(f"\n  {experiment.path} has job.json, logs, metrics and checkpoints")
    if not experiment.read_record().over:
        say("the job was left running; it is stopped with the demo's cluster")


def ours(cluster: LoopbackCluster, root: Path) -> Experiment | None:
    """Return the newest experiment that was launched on this cluster."""
    for candidate in reversed(experiments.every(root)):
        try:
            if candidate.read_record().ssh_config == str(cluster.ssh_config):
                return candidate
        except UsageError:
            continue
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
