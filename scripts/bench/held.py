"""Measure commands over connections that are held open beside the same commands that log in.

    python scripts/bench/held.py

A launch to its first all-reduce, and `orchestrator status` of a running job. Each in turns, on the
same hosts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import launch
from ground import (
    Cluster,
    Contender,
    Word,
    as_data,
    compete,
    machine,
    our,
    require_root,
    run,
    seconds,
    show,
    table,
    work_directory,
)

LAUNCH, STATUS = "launch, first all-reduce", "status of a running job"
NEW, HELD = "with a login", "connections held"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["2x2", "4x2"], help="nodes x ranks")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    about = machine(Path(sys.executable))
    results = {}
    for shape in options.shapes:
        nodes, ranks = map(int, shape.split("x"))
        results[shape] = contenders(ranks)
        compete(results[shape], nodes, options.repeat, shape)
    title = f"Held connections (median of {options.repeat})"
    show(options.json, title, about, render(results), as_data(results))


def contenders(ranks: int) -> list[Contender]:
    pairs = ((LAUNCH, partial(first_all_reduce, ranks)), (STATUS, status))
    return [
        Contender(f"{what}: {how}", partial(prepared, how == HELD, command))
        for what, command in pairs
        for how in (NEW, HELD)
    ]


def prepared(held: bool, command: Any, cluster: Cluster) -> Mapping[str, float]:
    connections = [*our("orchestrator"), "connections"]
    if not held:
        run(cluster, [*connections, "--close"])
        return dict(command(cluster))
    run(cluster, [*connections, "--nodes", cluster.node_list, "--open", "1h"])
    return dict(command(cluster))


def first_all_reduce(ranks: int, cluster: Cluster) -> Mapping[str, float]:
    return launch.timed(ranks, partial(words, Path(sys.executable)), cluster)


def words(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
    """Return a launch that chooses its Python as the servers do that wait."""
    given = launch.ours(python, cluster, ranks, out)
    at = given.index("--python")
    return [*given[:at], *given[at + 2 :]]


def status(cluster: Cluster) -> Mapping[str, float]:
    """Ask for a job that was started once for this cluster."""
    experiments = work_directory(cluster) / "running"
    where: list[Word] = ["--experiments", experiments]
    if not experiments.exists():
        sleeper = work_directory(cluster) / "sleeper.py"
        sleeper.write_text("import time\ntime.sleep(3600)\n")
        nodes: list[Word] = ["--nodes", cluster.node_list, *where, "--detach"]
        run(cluster, [*our("master_launch"), *nodes, sleeper])
    started = time.perf_counter()
    run(cluster, [*our("orchestrator"), "status", *where])
    return {"all_reduce": time.perf_counter() - started}


def render(results: Mapping[str, Sequence[Contender]]) -> str:
    head = [""]
    for shape in results:
        head += [shape, "of a login"]
    rows = []
    for index, one in enumerate(next(iter(results.values()))):
        row = [one.name]
        for everyone in results.values():
            value = everyone[index].median("all_reduce")
            base = everyone[index - index % 2].median("all_reduce")
            row += [seconds(value), f"{value / base:.2f}" if value and base else one.missing]
        rows.append(row)
    return table(head, rows)


if __name__ == "__main__":
    main()
