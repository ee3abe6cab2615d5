"""Measure from the kill -9 of a rank to the next good step on all ranks: ours and torchrun's.

    python scripts/bench/restart.py [--shapes 2x2] [--repeat 5]

Both start the same program (killed_once.py) on the same hosts with the same torch, in turns. One
restart is enough for ours; torchrun, typed on each host, may do three, because its agents can meet
in a generation that one of them has left. The first attempt runs for some seconds, in which ours
prepares what the next one needs.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: by default 2.13 gives the ranks of every attempt
the same store, in which gloo finds the addresses of the attempt before, and they never meet.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ground import (
    Cluster,
    Contender,
    Failed,
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

PROGRAM = "killed_once.py"
OURS, TORCHRUN = "master_launch --max-restarts", "torchrun --max-restarts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["2x2"], help="nodes x ranks")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--alive", type=float, default=12.0, help="seconds before the kill")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    about = machine()
    results = {}
    for shape in options.shapes:
        nodes, ranks = map(int, shape.split("x"))
        results[shape] = [
            Contender(OURS, partial(timed, ours, ranks, options.alive)),
            Contender(TORCHRUN, partial(timed, torchrun, ranks, options.alive)),
        ]
        compete(results[shape], nodes, options.repeat, shape)
    title = (
        f"From kill -9 of a rank to the next good step on all ranks (median of {options.repeat})"
    )
    show(options.json, title, about, render(results), as_data(results))


def timed(words: Any, ranks: int, alive: float, cluster: Cluster) -> Mapping[str, float]:
    """Run it once, and read the times that the ranks wrote. All hosts share one clock."""
    work = work_directory(cluster)
    shutil.copy(Path(__file__).with_name(PROGRAM), work)
    out = work / "out"
    out.mkdir()
    try:
        said = run(cluster, words(cluster, ranks, out, alive)).said
        good = [float(path.read_text()) for path in out.glob("good_*")]
        if len(good) != cluster.size * ranks:
            print(said, file=sys.stderr)
            raise Failed(f"{len(good)} of {cluster.size * ranks} ranks went on")
        return {"good": max(good) - float((out / "killed").read_text())}
    finally:
        shutil.rmtree(out)


def ours(cluster: Cluster, ranks: int, out: Path, alive: float) -> list[Word]:
    words = [*our("master_launch"), "--nodes", cluster.node_list, "--nproc", str(ranks)]
    words += ["--experiments", out.parent / "experiments", "--max-restarts", "1"]
    return [*words, PROGRAM, out, str(alive)]


def torchrun(cluster: Cluster, ranks: int, out: Path, alive: float) -> list[Word]:
    lines = []
    meet = f"{cluster.addresses[0]}:29400"
    for number, address in enumerate(cluster.addresses):
        command: list[Word] = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
        command += [sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nnodes={cluster.size}", f"--nproc-per-node={ranks}", "--max-restarts=3"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={meet}", f"--rdzv-id={out.name}"]
        command += [f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr={address}"]
        there = f"cd {out.parent} && {shlex.join(map(str, [*command, PROGRAM, out, alive]))}"
        lines.append(f'ssh {address} {shlex.quote(there)} & all="$all $!"\n')
    return ["bash", "-c", "".join(lines) + "for one in $all; do wait $one || exit 1; done"]


def render(results: Mapping[str, list[Contender]]) -> str:
    rows = []
    for shape, everyone in results.items():
        own, other = (one.median("good") for one in everyone)
        for one in everyone:
            found = [sample["good"] for sample in one.samples]
            spread = f"{min(found):.2f} to {max(found):.2f}" if found else one.missing
            middle = statistics.median(found) if found else None
            rows.append([shape, one.name, seconds(middle), spread])
        if own and other:
            rows.append([shape, "ratio", f"{own / other:.2f}", ""])
    return table(["shape", "", "median", "from, to"], rows)


if __name__ == "__main__":
    main()
