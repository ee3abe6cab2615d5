"""`orchestrator checkpoint`: list checkpoints, verify them, export their weights."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import (
    EXIT_CHECK,
    EXIT_DONE,
    EXIT_FAILED,
    CheckFailed,
    JobFailed,
    UsageError,
)
from orchestrator.config.launch import Where
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Cell, Column, Table, Terminal
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint, shown_name

HOME = Path(__file__).parents[3]
# One sequential reader does not saturate a network disk.
READERS = 4


def list_checkpoints(where: Where, experiment: str | None) -> int:
    """List the checkpoints, the newest first."""
    checkpoints = checkpoint_store.resolve_checkpoints(experiment, where.experiments)
    data = in_directory(checkpoints, [about(checkpoint) for checkpoint in checkpoints])
    output.print_result(data, partial(to_text, checkpoints))
    return EXIT_DONE


def to_text(checkpoints: Sequence[Checkpoint], terminal: Terminal) -> str:
    return f"{shown_name(checkpoints[0].path.parent)}\n{CHECKPOINTS.text(checkpoints, terminal)}"


def when(checkpoint: Checkpoint) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.created))


def state_of(checkpoint: Checkpoint) -> Cell:
    if checkpoint.complete:
        return "complete", styles.DONE
    return f"incomplete: {checkpoint.problem}", styles.FAILED


CHECKPOINTS: Table[Checkpoint] = Table(
    (
        Column("step", lambda one: str(one.step), right=True),
        Column("when", lambda one: when(one) if one.files else "-", drop=1),
        Column("size", lambda one: text.format_bytes(one.size) if one.files else "-", right=True),
        Column("world", lambda one: str(one.world) if one.files else "-", right=True, drop=2),
        Column("state", state_of),
    )
)


def about(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "created": checkpoint.created if checkpoint.files else None,
        "size": checkpoint.size,
        "world": checkpoint.world if checkpoint.files else None,
        "complete": checkpoint.complete,
        "problem": checkpoint.problem or None,
    }


def verify_checkpoints(where: Where, experiment: str | None) -> int:
    """Read every byte; the exit code is 1 if any differs from what was saved."""
    checkpoints = checkpoint_store.resolve_checkpoints(experiment, where.experiments)
    output.write_out(shown_name(checkpoints[0].path.parent))
    results, newest, damaged = [], None, False
    for checkpoint in checkpoints:
        began = time.monotonic()
        problems = read_all(checkpoint)
        if problems and not checkpoint.path.exists():
            # A running job has pruned the checkpoint during the check.
            continue
        damaged = damaged or bool(problems)
        newest = newest if problems or newest else checkpoint
        results.append({**about(checkpoint), "problems": problems})
        took = f"{text.format_bytes(checkpoint.size)} in {time.monotonic() - began:.1f} s"
        output.write_out(
            f"step {checkpoint.step}: " + ("DAMAGED" if problems else f"good ({took})")
        )
        for problem in problems:
            output.write_out(f"  {problem}")
    if newest is None:
        output.write_out("no training can resume from any of them")
    elif damaged:
        setting = shlex.quote(f"checkpoint.resume={newest.path}")
        message = f"the newest good one is step {newest.step}; to resume from it: --set {setting}"
        output.write_out(message)
    good = newest.step if newest else None
    output.print_result(in_directory(checkpoints, results, newest_good=good))
    return EXIT_FAILED if damaged else EXIT_DONE


def read_all(checkpoint: Checkpoint) -> list[str]:
    """Read all files of a checkpoint; return their problems in the order of the files."""
    if not checkpoint.files:
        return checkpoint_store.verify_checkpoint(checkpoint)
    progress = ProgressBar(f"step {checkpoint.step}", checkpoint.size)
    with progress, ThreadPoolExecutor(READERS) as readers:
        problem_lists = readers.map(
            lambda name: checkpoint_store.verify_checkpoint(checkpoint, [name], progress.add),
            checkpoint.files,
        )
        return [problem for problems in problem_lists for problem in problems]


def export_weights(
    where: Where,
    experiment: str | None,
    out: Path,
    step: int | None,
    dtype: str | None,
    layout: str,
    *,
    ema: bool = False,
    force: bool,
) -> int:
    """Export the weights in a subprocess, so that this process never imports torch."""
    if importlib.util.find_spec("torch") is None:
        raise CheckFailed(
            f"exporting needs torch, and {sys.executable} has none",
            "run it where torch is installed, on a node for example: only it can read the weights",
        )
    arguments = [str(out.absolute()), "--layout", layout]
    arguments += ["--dtype", dtype] if dtype else []
    arguments += ["--ema"] if ema else []
    arguments += ["--force"] if force else []
    left = candidates(where, experiment, step)
    while True:
        module = [sys.executable, "-m", "orchestrator.engine.export", str(left.pop(0).path)]
        # Started in the directory of this package, so that no module of the user's is found first.
        code = subprocess.run([*module, *arguments], cwd=HOME, check=False).returncode
        if code < 0:
            raise JobFailed(
                f"the export was killed by signal {-code}",
                "it needs memory for the weights twice",
            )
        if code != EXIT_CHECK or not left:
            return code
        output.complain(f"trying the one before it, of step {left[0].step}")


def candidates(where: Where, experiment: str | None, step: int | None) -> list[Checkpoint]:
    """Return the checkpoint of the wanted step, or else all that look complete, newest first."""
    known = checkpoint_store.resolve_checkpoints(experiment, where.experiments)
    if step is not None:
        wanted = [checkpoint for checkpoint in known if checkpoint.step == step]
        there = ", ".join(str(checkpoint.step) for checkpoint in known[:10])
        if not wanted:
            raise UsageError(f"there is no checkpoint of step {step}", f"there are: {there}")
        return wanted
    whole = [checkpoint for checkpoint in known if checkpoint.complete]
    if not whole:
        raise CheckFailed(
            f"no checkpoint in {shown_name(known[0].path.parent)} is complete",
            f"the newest, of step {known[0].step}: {known[0].problem}",
        )
    return whole


def in_directory(
    checkpoints: Sequence[Checkpoint], results: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    return {"directory": str(checkpoints[0].path.parent), **more, "checkpoints": results}
