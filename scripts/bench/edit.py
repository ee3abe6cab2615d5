"""Measure a run after an edit: in a snapshot that is sent to all nodes, and on a disk they share.

    python scripts/bench/edit.py [--nodes 4] [--files 200]

All in turns on the same hosts, to the first all-reduce, each from warm nodes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import launch
import warm
from ground import (
    Cluster,
    Contender,
    Word,
    as_data,
    compete,
    machine,
    require_root,
    seconds,
    show,
    table,
    work_directory,
)

WITHOUT = "a disk that all share, no sync"
EDITS = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    about = machine(Path(sys.executable))
    found = [
        Contender(WITHOUT, partial(relaunch, "off", options.files, False)),
        Contender("a snapshot, nothing changed", partial(relaunch, "always", options.files, False)),
        Contender("a snapshot, one file edited", partial(relaunch, "always", options.files, True)),
    ]
    compete(found, options.nodes, options.repeat, f"{options.nodes} nodes")
    title = f"A run of {options.files} files on {options.nodes} nodes (median of {options.repeat})"
    show(options.json, title, about, render(found), as_data({str(options.nodes): found}))


def relaunch(sync: str, files: int, edit: bool, cluster: Cluster) -> Mapping[str, float]:
    """Start from what waits; the first launch on these hosts makes it wait."""
    work = work_directory(cluster)
    if not (work / "part_0.py").exists():
        for number in range(files):
            (work / f"part_{number}.py").write_text(f"x = {number}\n" * 100)
        timed(sync, cluster)
    warm.wait_until_ready(cluster)
    if edit:
        (work / "part_0.py").write_text(f"x = {next(EDITS)}\n")
    return timed(sync, cluster)


def timed(sync: str, cluster: Cluster) -> Mapping[str, float]:
    def words(cluster: Cluster, ranks: int, out: Path) -> list[Word]:
        given: list[Any] = warm.words_of(Path(sys.executable), cluster, ranks, out)
        return [*given[:-2], "--sync", sync, "--warm", *given[-2:]]

    return launch.timed(1, words, cluster)


def render(found: list[Contender]) -> str:
    base = found[0].median("all_reduce")
    rows = []
    for one in found:
        value = one.median("all_reduce")
        more = f"{value - base:+.2f} s" if value and base else one.missing
        rows.append([one.name, seconds(value), more])
    return table(["", "first all-reduce", "of that sync"], rows)


if __name__ == "__main__":
    main()
