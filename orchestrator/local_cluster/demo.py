"""`orchestrator demo`: a cluster on this machine, a training run on it, and its result.

It runs `master_launch` as a user would, in a process of its own, with an ssh_config and a node
list that lead to SSH servers on 127.0.0.2, .3, ...; the result is read from the experiment.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

from orchestrator.common import interrupt, text
from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.screen import output
from orchestrator.local_cluster.cluster import LoopbackCluster, sweep
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from orchestrator.records.metrics import trainers

CONFIG = Path("config/demo.yaml")
NODES = Path("node_ip_list.txt")
SLOTS = 2  # ranks per node
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# config/demo.yaml for those who installed the package and have no clone; a test holds them equal.
SETTINGS = """\
launch: {name: demo}
training: {max_steps: 120, batch_size: 8}
dataset: {sequence_length: 64}
logging: {interval: 5}
model: {num_layers: 2, model_dim: 64, num_heads: 4}
optimizer: {lr: 6.0e-3}
fsdp: {sharding_strategy: hybrid_shard}
env: {CUDA_VISIBLE_DEVICES: "", PYTHONWARNINGS: "ignore:Failed to initialize NumPy"}
"""

NOTES = {
    "config.yaml": "the settings, resolved",
    "manifest.json": "code, versions, environment",
    "job.json": "nodes, ranks, state, exit code",
    "logs": "what the ranks printed",
    "outputs": "metrics of every rank, checkpoints",
}


def demo(size: int, keep: bool, options: tuple[str, ...], arguments: LaunchArguments) -> int:
    """Launch with these options, parsed as `arguments`, on a new cluster; return the exit code."""
    if "python" not in arguments.launch and importlib.util.find_spec("torch") is None:
        raise CheckFailed(
            f"the demo trains with torch, and {sys.executable} has none",
            f"type: {shlex.quote(sys.executable)} -m pip install torch==2.13.0 numpy",
        )
    cluster = LoopbackCluster(size, make_directory(), port=listed_port(size), slots=SLOTS)
    try:
        say(f"starting {size} SSH servers on this machine; each plays a node of {SLOTS} ranks")
        cluster.start()
        code, told_to_end = launch(cluster, options)
        if not arguments.dry_run:
            show(cluster, arguments.where.experiments)
        if keep and not told_to_end:
            output.tell(invitation(cluster))
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            signal.sigwait(SIGNALS)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a second Ctrl-C would leave half of it
        if not arguments.dry_run:
            stop_job(cluster, arguments.where.experiments)
        cluster.stop()
        remove(cluster.directory)
    return code


# -- the cluster and the launch -------------------------------------------------------------------


def make_directory() -> Path:
    """Make a directory for keys, logs and homes, which is removed at the end, also by Ctrl-C."""
    interrupt.hold()
    directory = Path(tempfile.mkdtemp(prefix="orch-demo-"))
    interrupt.undo_with(lambda: remove(directory))
    interrupt.answer_now()
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    return directory


def remove(directory: Path) -> None:
    sweep(directory)
    shutil.rmtree(directory, ignore_errors=True)


def listed_port(size: int) -> int:
    """Return the port of the node list here if its nodes are the demo's and it is free, else 0."""
    from orchestrator.head.nodes.node_list import read_nodes

    addresses = [f"127.0.0.{2 + i}" for i in range(size)]
    try:
        nodes = read_nodes(NODES)
    except UsageError:
        return 0
    ports = {node.port for node in nodes}
    port = ports.pop() or 0
    if ports or not port or {node.host for node in nodes} != set(addresses):
        return 0
    for address in addresses:
        with closing(socket.socket()) as listener:
            # As sshd does: what an earlier demo left in TIME_WAIT is not in its way.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
            except OSError as error:
                say(f"port {port} of {NODES} is not available ({error.strerror}): using another")
                return 0
    return port


def launch(cluster: LoopbackCluster, arguments: Sequence[str]) -> tuple[int, bool]:
    """Run master_launch and wait for it; return its exit code, and whether a signal ended us."""
    options = ["--nodes", str(cluster.node_list), "--ssh-config", str(cluster.ssh_config)]
    options += ["--config", str(settings(cluster)), *arguments]
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
    """Stop a job that was left running, so that its head in the background ends, too."""
    experiment = ours(cluster, root)
    if experiment is not None and not experiment.read_record().over:
        command = [sys.executable, "-m", "orchestrator", "stop", experiment.name, "--grace", "0"]
        subprocess.run([*command, "--experiments", str(root)], check=False)


def settings(cluster: LoopbackCluster) -> Path:
    if CONFIG.is_file():
        return CONFIG
    path = cluster.directory / "demo.yaml"
    path.write_text(SETTINGS, encoding="utf-8")
    return path


# -- the result -----------------------------------------------------------------------------------


def show(cluster: LoopbackCluster, root: Path) -> None:
    """Show the job's loss as a curve, and what its experiment holds."""
    experiment = ours(cluster, root)
    if experiment is None:
        return  # it never came to an experiment; the launch has said why
    steps = read_metrics(experiment.path / "outputs" / trainers.file_name(0))
    if steps:
        first, last = steps[0], steps[-1]
        output.tell(
            f"\n  loss {first['loss']:.2f} -> {last['loss']:.2f} in {last['step']} steps"
            f"{speed_of(steps)}\n"
        )
        curve = plot([step["loss"] for step in steps], last["step"])
        output.tell("\n".join(f"  {line}" for line in curve))
    output.tell(f"\n  {experiment.path}")
    output.tell("\n".join(f"  {line}" for line in tree(experiment.path)))
    if not experiment.read_record().over:
        say("the job was left running; it is stopped with the demo's cluster")


def speed_of(steps: Sequence[dict[str, Any]]) -> str:
    """Return the speed, if every line has the time of its steps; a user's own may not."""
    if not all("step_ms" in step for step in steps) or "tokens" not in steps[-1]:
        return ""
    before = [0, *(step["step"] for step in steps)]  # step_ms is a mean since the line before
    parts = zip(steps, before, strict=False)
    seconds = sum(step["step_ms"] * (step["step"] - earlier) for step, earlier in parts) / 1e3
    return f" ({seconds:.1f} s, {steps[-1]['tokens'] / seconds:,.0f} tokens/s)"


def ours(cluster: LoopbackCluster, root: Path) -> Experiment | None:
    """Return the newest experiment that was launched on this cluster."""
    for candidate in reversed(experiments.every(root)):
        try:
            if candidate.read_record().ssh_config == str(cluster.ssh_config):
                return candidate
        except UsageError:
            continue
    return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():  # a program of the user's own writes what it likes
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    # Evaluations have lines of their own; a step that was skipped has no loss.
    return [record for record in records if record.get("loss") is not None and "step" in record]


def plot(values: Sequence[float], last: int, width: int = 60, height: int = 10) -> list[str]:
    """Draw a curve of ASCII characters up to step `last`; a column is the mean of its share."""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    means = [mean for mean in means if math.isfinite(mean)] or [0.0]
    top, bottom = max(means), min(means)
    rows = [round((top - mean) / ((top - bottom) or 1.0) * (height - 1)) for mean in means]
    lines = []
    for row in range(height):
        level = top - (top - bottom) * row / (height - 1)
        lines.append(f"{level:6.2f} |" + "".join("*" if at == row else " " for at in rows).rstrip())
    lines.append(" " * 7 + "+" + "-" * len(means))
    lines.append(" " * 7 + "step 1 " + str(last).rjust(len(means) - 6))
    return lines


def tree(directory: Path) -> list[str]:
    """List every file below a directory with its size, and the purpose of those at the top."""
    rows = []
    for path in sorted(directory.rglob("[!.]*")):
        inside = path.relative_to(directory)
        name = "  " * len(inside.parts) + path.name + ("/" if path.is_dir() else "")
        size = text.size(path.stat().st_size) if path.is_file() else ""
        rows.append((name, size, NOTES.get(str(inside), "")))
    return text.table(rows, right={1})


# -- --keep ---------------------------------------------------------------------------------------


def invitation(cluster: LoopbackCluster) -> str:
    """Return the commands to type in another terminal."""
    reach = f"--ssh-config {shlex.quote(str(cluster.ssh_config))}"
    nodes = f"--nodes {shlex.quote(str(cluster.node_list))} {reach}"
    if listed(cluster):
        nodes = reach  # node_ip_list.txt is the default
    lines = [
        f"cd {shlex.quote(str(Path.cwd()))}",
        f"{program('master_launch')} {nodes} --config {shlex.quote(str(settings(cluster)))}",
        f"{program('master_launch')} {nodes} your_script.py its arguments",
        f"{program('orchestrator')} status",
        f"{program('emergency_stop')} {nodes}",
        f"ssh -F {shlex.quote(str(cluster.ssh_config))} {cluster.addresses[0]}",
    ]
    return (
        f"\nThe {len(cluster.nodes)} nodes stay up. Type in another terminal, for example:\n\n"
        + "\n".join(f"    {line}" for line in lines)
        + "\n\nCtrl-C here ends them."
    )


def listed(cluster: LoopbackCluster) -> bool:
    """Tell whether the node list here leads to this cluster."""
    from orchestrator.head.nodes.node_list import read_nodes

    try:
        nodes = read_nodes(NODES)
    except UsageError:
        return False
    here = [(node.address, node.port) for node in cluster.nodes]
    return [(node.host, node.port) for node in nodes] == here


def program(name: str) -> str:
    """Return a command's name if the shell finds this Python's command by it, else its path."""
    beside = Path(sys.executable).with_name(name)
    path = shutil.which(name)
    if not beside.exists() or (path and Path(path) == beside):
        return name
    return shlex.quote(str(beside))


def say(text: str) -> None:
    output.tell(f"demo: {text}")
