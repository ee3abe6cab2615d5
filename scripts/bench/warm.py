"""Measure a warm start, a cold one and torchrun by hand: to the first all-reduce on all ranks.

    python scripts/bench/warm.py [--shapes 2x2 4x2] [--idle 60] [--step] [--lasts 15]

All in turns on the same hosts, with the same program and torch (launch.py). The spare is ready
before each warm start, but for "at once": right after the end of a job that lasted so long.
Also printed: its memory, and the CPU that it takes while it waits. With --step, to the first step
of an optimizer under DDP (first_step.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import launch
from ground import (
    Cluster,
    Contender,
    Failed,
    Word,
    compete,
    fresh,
    machine,
    our,
    require_root,
    run,
    show,
    table,
)

BY_HAND = "torchrun by hand over ssh"
READY_SECONDS = 60.0
STEPS = {
    "program": "program begins",
    "group": "group is made",
    "all_reduce": "all-reduce is done",
    "step": "step is done",
}
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["2x2", "4x2"], help="nodes x ranks")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to watch what waits")
    parser.add_argument("--step", action="store_true", help="to the first step of an optimizer")
    parser.add_argument("--lasts", type=float, default=15.0, help="seconds, of the job before")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    if options.step:
        launch.PROGRAM = "first_step.py"
    python = Path(sys.executable)
    about = machine(python)
    results = {}
    for shape in options.shapes:
        nodes, ranks = map(int, shape.split("x"))
        results[shape] = contenders(python, ranks, options.lasts)
        compete(results[shape], nodes, options.repeat, shape)
    waiting = watch(python, options.idle)
    data = {
        "shapes": {shape: {c.name: c.samples for c in found} for shape, found in results.items()},
        "waiting": waiting,
    }
    last = "step" if options.step else "all_reduce"
    what = "step" if options.step else "all-reduce"
    title = f"From the command to the first {what} on all ranks (median of {options.repeat})"
    show(options.json, title, about, render(results, waiting, last), data)


def contenders(python: Path, ranks: int, lasts: float) -> list[Contender]:
    def ours(option: str | None, *arguments: str) -> Callable[[Cluster], Mapping[str, float]]:
        def words(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
            *given, program, place = words_of(python, cluster, ranks, out)
            options = [option] if option else []
            return [*given, *options, program, place, *arguments]

        return partial(launch.timed, ranks, partial(words, python))

    cold, warm = ours(None), ours("--warm")

    def warm_again(cluster: Cluster) -> Mapping[str, float]:
        if not all(node["warm"] for node in listed(cluster)):
            warm(cluster)
        wait_until_ready(cluster)
        sample = warm(cluster)
        # The spare is ready before the next contender.
        wait_until_ready(cluster)
        return sample

    def at_once(cluster: Cluster) -> Mapping[str, float]:
        # An argument, since a variable would make the next start cold.
        ours("--warm", f"{lasts:g}")(cluster)
        sample = warm(cluster)
        wait_until_ready(cluster)
        return sample

    by_hand = partial(launch.timed, ranks, partial(launch.by_hand, python))
    return [
        Contender("master_launch, cold", cold),
        Contender("master_launch, warm", warm_again),
        Contender("master_launch, warm, at once", at_once),
        Contender(BY_HAND, by_hand),
    ]


def words_of(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
    """Return a launch that chooses its Python as the processes do that wait."""
    given = launch.ours(python, cluster, ranks, out)
    at = given.index("--python")
    return [*given[:at], *given[at + 2 :]]


def listed(cluster: Cluster) -> list[dict[str, Any]]:
    words = [
        *our("orchestrator"),
        "nodes",
        "--warm",
        "list",
        "--json",
        "--nodes",
        cluster.node_list,
    ]
    nodes: list[dict[str, Any]] = json.loads(run(cluster, words).said)["nodes"]
    return nodes


def wait_until_ready(cluster: Cluster) -> list[dict[str, Any]]:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        nodes = listed(cluster)
        if all(node["warm"] and node["warm"][0]["ready"] for node in nodes):
            return [node["warm"][0] for node in nodes]
        if time.monotonic() > deadline:
            raise Failed(f"not warm after {READY_SECONDS:g} s: {nodes}")


def watch(python: Path, seconds: float) -> dict[str, float]:
    """Return the memory of what waits on a node, and the part of a core that it takes."""
    with fresh(1) as cluster:
        words = partial(launch.ours, python)
        launch.timed(2, lambda *a: [*words(*a)[:-2], "--warm", *words(*a)[-2:]], cluster)
        (standby,) = wait_until_ready(cluster)
        pid = standby_process()
        before, began = ticks(pid), time.monotonic()
        time.sleep(seconds)
        used, waited = (ticks(pid) - before) / TICKS, time.monotonic() - began
    return {"bytes": standby["memory"], "of_a_core": used / waited}


def standby_process() -> int:
    """Return the process that waits, by the PID that it has outside of its host."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"/node/warm/standby.py") for word in words):
                return int(entry.name)
    raise Failed("no process waits")


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def render(results: Mapping[str, list[Contender]], waiting: Mapping[str, float], last: str) -> str:
    shown = {step: words for step, words in STEPS.items() if step in ("program", "group", last)}
    head = ["", "", *shown.values(), "of torchrun"]
    rows = []
    for shape, found in results.items():
        theirs = next(one for one in found if one.name == BY_HAND).median(last)
        for one in found:
            mine = one.median(last)
            part = f"{mine / theirs:.2f}" if mine and theirs else one.missing
            steps = [one.median(step) for step in shown]
            rows.append([shape, one.name, *(f"{s:.2f} s" if s else "" for s in steps), part])
    memory = f"{waiting['bytes'] / 2**20:.0f} MiB"
    idle = f"waiting on one node: {memory}, {waiting['of_a_core']:.4%} of a core"
    return f"{table(head, rows)}\n\n{idle}"


if __name__ == "__main__":
    main()
