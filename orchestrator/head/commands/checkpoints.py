"""`orchestrator checkpoint`: which there are, whether they are sound, their weights as one file."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from orchestrator import text
from orchestrator.errors import (
    EXIT_CHECK,
    EXIT_DONE,
    EXIT_FAILED,
    CheckFailed,
    JobFailed,
    UsageError,
)
from orchestrator.head.screen.output import tell
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint, shown

HOME = Path(__file__).parents[3]
READERS = 4  # files read at a time: one alone does not fill a network disk
TOLD_EVERY = 0.2  # seconds between two looks at how far it is


def ls(options: dict[str, Any]) -> int:
    found = resolve(options)
    if options["as_json"]:
        tell_json(found, [about(one) for one in found])
        return EXIT_DONE
    tell(shown(found[0].path.parent))
    row = "{:>9}  {:19}  {:>8}  {:>5}  {}"
    tell(row.format("step", "when", "size", "world", "state"))
    for one in found:
        known = bool(one.files)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.created)) if known else "-"
        size, world = (text.size(one.size), one.world) if known else ("-", "-")
        state = "complete" if one.complete else f"incomplete: {one.problem}"
        tell(row.format(one.step, when, size, world, state))
    return EXIT_DONE


def about(one: Checkpoint) -> dict[str, Any]:
    return {
        "step": one.step,
        "path": str(one.path),
        "created": one.created if one.files else None,
        "size": one.size,
        "world": one.world if one.files else None,
        "complete": one.complete,
        "problem": one.problem or None,
    }


def verify(options: dict[str, Any]) -> int:
    """Read every byte; 1 if any of it is not what was saved."""
    found = resolve(options)
    if not options["as_json"]:
        tell(shown(found[0].path.parent))
    told, newest, damaged = [], None, False
    for one in found:
        began = time.monotonic()
        problems = read_all(one)
        if problems and not one.path.exists():
            continue  # a running job has pruned it meanwhile
        damaged = damaged or bool(problems)
        newest = newest if problems or newest else one
        told.append({**about(one), "problems": problems})
        if options["as_json"]:
            continue
        took = f"{text.size(one.size)} in {time.monotonic() - began:.1f} s"
        tell(f"step {one.step}: " + ("DAMAGED" if problems else f"good ({took})"))
        for problem in problems:
            tell(f"  {problem}")
    if options["as_json"]:
        tell_json(found, told, newest_good=newest.step if newest else None)
    elif newest is None:
        tell("none of them can be resumed from")
    elif damaged:
        where = shlex.quote(f"checkpoint.resume={newest.path}")
        tell(f"the newest good one is step {newest.step}; to resume from it: --set {where}")
    return EXIT_FAILED if damaged else EXIT_DONE


def read_all(one: Checkpoint) -> list[str]:
    """All its problems, in the order of its files."""
    if not one.files:
        return checkpoint_store.verify(one)
    progress = Progress(f"step {one.step}", one.size)
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(
            lambda name: checkpoint_store.verify(one, [name], progress.add), one.files
        )
        problems = [problem for problems in found for problem in problems]
    progress.clear()
    return problems


class Progress:
    """How far it is, on a line of its own that goes away again; nothing where nobody looks."""

    def __init__(self, what: str, size: int) -> None:
        self.what, self.size, self.done = what, size, 0
        self.lock = threading.Lock()
        self.tty = sys.stderr.isatty()
        self.next = time.monotonic() + TOLD_EVERY
        self.dirty = False

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if self.tty and time.monotonic() > self.next:
                self.next = time.monotonic() + TOLD_EVERY
                self.dirty = True
                line = f"{self.what}: {text.size(self.done)} of {text.size(self.size)}"
                click.echo(f"\r\x1b[K{line}", err=True, nl=False)

    def clear(self) -> None:
        if self.dirty:
            click.echo("\r\x1b[K", err=True, nl=False)


def export(options: dict[str, Any]) -> int:
    """In a process of its own: torch does not come into this one."""
    if len(options["experiment"]) > 1:
        raise UsageError(
            f"too many arguments: {shlex.join(options['experiment'])}",
            "orchestrator checkpoint export [EXP_OR_DIR] OUT",
        )
    if importlib.util.find_spec("torch") is None:
        raise CheckFailed(
            f"exporting needs torch, and {sys.executable} has none",
            "run it where torch is installed, on a node for example: only it can read the weights",
        )
    words = [str(options["out"].absolute())]
    words += ["--dtype", options["dtype"]] if options["dtype"] else []
    words += ["--force"] if options["force"] else []
    left = candidates(options)
    while True:
        module = [sys.executable, "-m", "orchestrator.engine.saving.export", str(left.pop(0).path)]
        # From where this package lies: it is found there, and nothing of the user's in its stead.
        code = subprocess.run([*module, *words], cwd=HOME, check=False).returncode
        if code < 0:
            raise JobFailed(
                f"the export was killed by signal {-code}",
                "it needs memory for twice the largest tensor",
            )
        if code != EXIT_CHECK or not left:
            return code
        click.echo(f"trying the one before it, of step {left[0].step}", err=True)


def candidates(options: dict[str, Any]) -> list[Checkpoint]:
    """The one that was asked for; else all that look whole, newest first."""
    found = resolve({**options, "experiment": next(iter(options["experiment"]), None)})
    step = options["step"]
    if step is not None:
        wanted = [one for one in found if one.step == step]
        there = ", ".join(str(one.step) for one in found[:10])
        if not wanted:
            raise UsageError(f"there is no checkpoint of step {step}", f"there are: {there}")
        return wanted
    whole = [one for one in found if one.complete]
    if not whole:
        raise CheckFailed(
            f"no checkpoint in {shown(found[0].path.parent)} is complete",
            f"the newest, of step {found[0].step}: {found[0].problem}",
        )
    return whole


def resolve(options: dict[str, Any]) -> list[Checkpoint]:
    return checkpoint_store.resolve(options["experiment"], options["experiments"])


# -- words ------------------------------------------------------------------------------------


def tell_json(found: Sequence[Checkpoint], told: list[dict[str, Any]], **more: Any) -> None:
    whole = {"directory": str(found[0].path.parent), **more, "checkpoints": told}
    tell(json.dumps(whole, indent=1))
