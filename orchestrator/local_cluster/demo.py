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
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common import interrupt
from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, CheckFailed, UsageError
from orchestrator.common.program import how_to_add
from orchestrator.common.text import plural
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.commands import stop
from orchestrator.head.commands.launch import launch
from orchestrator.head.screen import output
from orchestrator.local_cluster.cluster import LoopbackCluster, kill_cluster, kill_processes
from orchestrator.node.job import resume_dir
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from orchestrator.records.goodput import ACCOUNT, accounts_in
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.curves import POINTS
from orchestrator.records.metrics.curves import rank_curves as curves_of
from orchestrator.records.metrics.lines import GrowingFile

TORCH = ("torch", "numpy")
CONFIG = Path("config/demo.yaml")
# The number of ranks per node.
SLOTS = 2
SETTINGS = ("training.max_steps=36", "logging.interval=1", "checkpoint.memory_every=1")
# The options for --kill: every step is logged, and kept in the memory of both nodes.
WITH_FAULTS = ("--max-restarts", "2", *(f"--set={setting}" for setting in SETTINGS))
# The steps before each fault.
STEPS = 12
# The part of a step after which it comes.
LATE = 0.8
LOOK_SECONDS = 0.02
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_demo(
    size: int, keep: bool, kill: bool, words: Sequence[str], arguments: LaunchArguments
) -> int:
    """Launch with these options, typed as `words`, on a new cluster; return the exit code."""
    if kill and (size < 2 or arguments.program or arguments.module or arguments.detach):
        raise UsageError(
            "--kill shows how the built-in training survives, on two nodes or more",
            "leave out the script, --detach and --size",
        )
    if "python" not in arguments.launch and importlib.util.find_spec("torch") is None:
        what, fix = f"the demo trains with torch, and {sys.executable} has none", how_to_add(*TORCH)
        again = fix.startswith("uvx ") and sys.stdin.isatty()
        if not again or not output.user_agrees(f"{what}: {fix}\nRun that, which downloads it?"):
            raise CheckFailed(what, fix)
        os.execvp("uvx", shlex.split(fix))
    directory = Path(tempfile.mkdtemp(prefix="orch-demo-"))
    interrupt.call_before_exit(lambda: remove(directory))
    cluster = LoopbackCluster(size, directory, slots=SLOTS)
    where = replace(arguments.where, nodes=cluster.node_list, ssh_config=cluster.ssh_config)
    config = arguments.config_file or CONFIG
    say(f"starting {size} SSH servers on this machine; each plays a node of {SLOTS} ranks")
    try:
        cluster.start()
        typed = ["--nodes", str(cluster.node_list), "--ssh-config", str(cluster.ssh_config)]
        say(f"master_launch {shlex.join([*typed, '--config', str(config), *words])}")
        arguments = replace(arguments, where=where, config_file=config)
        code = survive(cluster, arguments) if kill else launch(arguments)
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
            stop.stop_job(where, left.name, grace=0.0)
        cluster.stop()
        remove(directory)
    return code


def remove(directory: Path) -> None:
    kill_cluster(directory)
    shutil.rmtree(directory, ignore_errors=True)


# -- --kill ---------------------------------------------------------------------------------------


def survive(cluster: LoopbackCluster, arguments: LaunchArguments) -> int:
    """Train with two faults, and again without; return 1 if the losses are not the same."""
    over, faults = threading.Event(), list[str]()
    thread = threading.Thread(target=strike, args=(cluster, arguments.where, over, faults))
    thread.start()
    try:
        code = launch(arguments)
    finally:
        over.set()
        thread.join()
    broken = ours(arguments.where)
    if code or broken is None:
        return code
    say("the same training without faults, to compare")
    code = launch(replace(arguments, view=replace(arguments.view, quiet=True)))
    whole = ours(arguments.where)
    if code or whole is None:
        return code
    same = losses(broken) == losses(whole) != {}
    began = {number: one.first for number, one in accounts_in(broken.path / ACCOUNT).items()}
    # The steps that an attempt had reached, and that the next one did again.
    again = (
        (one.step or 0) - began.get(one.number + 1, 0) for one in broken.read_record().attempts
    )
    lost = sum(max(0, steps) for steps in list(again)[:-1])
    ending = (
        "equal to the undisturbed run to the bit" if same else "NOT those of the undisturbed run"
    )
    say(f"{plural(len(faults), 'fault')}, {lost} steps lost, losses {ending}")
    return EXIT_DONE if same else EXIT_FAILED


def strike(
    cluster: LoopbackCluster, where: Where, over: threading.Event, faults: list[str]
) -> None:
    """Kill a rank, and later a node with its memory, each late in a step."""
    for fault in ("kill -9 of rank", "power off and on, with its memory:"):
        point = trainers.Point()
        while (point.step or 0) < STEPS * (len(faults) + 1):
            if over.wait(LOOK_SECONDS):
                return
            job = ours(where)
            point = trainers.read_last_values(metrics(job) if job else None)
        # By then the state after the last step is in the memory of both nodes.
        over.wait((point.number("step_ms") or 0.0) * LATE / 1000)
        assert job is not None
        record = job.read_record()
        node = record.nodes[-1]
        rank, state = max(node.ranks.items())
        say(f"{fault} {node.name if faults else rank}")
        if faults:
            name = f"{record.job}.{node.part}"
            cluster.reboot(node.index, Path(resume_dir.resume_roots()[0], name))
        else:
            kill_processes(filter(None, [state.pid]))
        faults.append(fault)


def metrics(experiment: Experiment) -> Path:
    return experiment.path / "outputs" / trainers.file_name(0)


def losses(experiment: Experiment) -> dict[int, float]:
    """Return the loss of each step of rank 0."""
    lines = GrowingFile(metrics(experiment)).lines()
    return {line["step"]: line["loss"] for line in lines if trainers.OF_A_STEP in line}


# -- the result -----------------------------------------------------------------------------------


def show(experiment: Experiment) -> None:
    """Show the job's first and last loss, and what its experiment holds."""
    curves = curves_of(metrics(experiment), POINTS)
    if "loss" in curves:
        loss, last = curves["loss"].means, curves["loss"].steps[-1]
        output.write_out(f"\n  loss {loss[0]:.2f} -> {loss[-1]:.2f} in {last} steps\n")
    output.write_out(f"\n  {experiment.path} has job.json, logs, metrics and checkpoints")
    if not experiment.read_record().over:
        say("the job was left running; it is stopped with the demo's cluster")


def ours(where: Where) -> Experiment | None:
    """Return the experiment that was launched on the cluster with this ssh_config."""
    for candidate in reversed(experiments.list_experiments(where)):
        with contextlib.suppress(UsageError):
            if candidate.read_record().ssh_config == str(where.ssh_config):
                return candidate
    return None


# -- --keep ---------------------------------------------------------------------------------------


def invitation(cluster: LoopbackCluster) -> str:
    """Return the commands to type in another terminal, in any directory; the first one is a file.

    That file names this Python's commands if the shell lacks them, and the cluster.
    """
    settings = [
        *(f"export PATH={shlex.quote(str(folder))}:$PATH" for folder in unlisted()),
        f"export ORCHESTRATOR_SSH_CONFIG={shlex.quote(str(cluster.ssh_config))}",
        f"export ORCHESTRATOR_NODES={shlex.quote(str(cluster.node_list))}",
    ]
    file = cluster.directory / "env.sh"
    file.write_text("".join(f"{line}\n" for line in settings))
    lines = [
        f"source {shlex.quote(str(file))}",
        "master_launch train.py",
        "orchestrator status",
        "emergency_stop",
        f'ssh -F "$ORCHESTRATOR_SSH_CONFIG" {cluster.addresses[0]}',
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
