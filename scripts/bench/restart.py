"""Measure from the kill -9 of a rank to the next good step on all ranks: ours and torchrun's.

    python scripts/bench/restart.py [--shapes 2x2] [--repeat 5]
    python scripts/bench/restart.py --cut     from the cut of a node's links, with a spare, instead

Both start the same program (killed_once.py) on the same hosts with the same torch, in turns. One
restart is enough for ours; torchrun, typed on each host, may do three, because its agents can meet
in a generation that one of them has left. The first attempt runs for some seconds, in which ours
prepares what the next one needs.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: by default 2.13 gives the ranks of every attempt
the same store, in which gloo finds the addresses of the attempt before, and they never meet.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ground import (
    LIMIT,
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
# Seconds; the default of a launch is 60.
LEASE = 8
FOREVER = 1e9
OURS, TORCHRUN = "master_launch --max-restarts", "torchrun --max-restarts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["2x2"], help="nodes x ranks")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--alive", type=float, default=12.0, help="seconds before the kill")
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    about = machine()
    results = {}
    for shape in options.shapes:
        nodes, ranks = map(int, shape.split("x"))
        if options.cut:
            cuts = {"a node is cut off": nodes - 1, "the master's node is cut off": 0}
            results[shape] = [
                Contender(name, partial(timed_cut, nodes, ranks, options.alive, node))
                for name, node in cuts.items()
            ]
        else:
            results[shape] = [
                Contender(OURS, partial(timed, ours, ranks, options.alive)),
                Contender(TORCHRUN, partial(timed, torchrun, ranks, options.alive)),
            ]
        compete(results[shape], nodes + options.cut, options.repeat, shape)
    what = f"the cut, a spare waiting, lease {LEASE} s," if options.cut else "kill -9 of a rank"
    title = f"From {what} to the next good step on all ranks (median of {options.repeat})"
    show(options.json, title, about, render(results), as_data(results))


def timed(words: Any, ranks: int, alive: float, cluster: Cluster) -> Mapping[str, float]:
    """Run it once, and read the times that the ranks wrote. All hosts share one clock."""
    with directory_of(cluster) as out:
        said = run(cluster, words(cluster, ranks, out, alive)).said
        return read_times(out, cluster.size * ranks, said)


def timed_cut(
    nodes: int, ranks: int, alive: float, node: int, cluster: Cluster
) -> Mapping[str, float]:
    """Cut a node off in a job that has one more in its list."""
    with directory_of(cluster) as out:
        options = ("--nnodes", str(nodes), "--node-loss-timeout", str(LEASE))
        command = ours(cluster, ranks, out, FOREVER, *options)
        cutting = threading.Thread(target=cut, args=(cluster, node, out, nodes * ranks, alive))
        cutting.start()
        try:
            said = run(cluster, command).said
        finally:
            cutting.join()
            cluster.restore(node)
        return read_times(out, nodes * ranks, said)


def cut(cluster: Cluster, node: int, out: Path, ranks: int, alive: float) -> None:
    deadline = time.monotonic() + LIMIT
    while len(list(out.glob("begun_*"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.1)
    # The spare has the time to import torch.
    time.sleep(alive)
    (out / "killed").write_text(str(time.time()))
    cluster.cut(node)


@contextlib.contextmanager
def directory_of(cluster: Cluster) -> Iterator[Path]:
    work = work_directory(cluster)
    shutil.copy(Path(__file__).with_name(PROGRAM), work)
    out = work / "out"
    out.mkdir()
    try:
        yield out
    finally:
        shutil.rmtree(out)


def read_times(out: Path, ranks: int, said: str) -> Mapping[str, float]:
    good = [float(path.read_text()) for path in out.glob("good_*")]
    if len(good) != ranks:
        print(said, file=sys.stderr)
        raise Failed(f"{len(good)} of {ranks} ranks went on")
    return {"good": max(good) - float((out / "killed").read_text())}


def ours(cluster: Cluster, ranks: int, out: Path, alive: float, *options: str) -> list[Word]:
    words = [*our("master_launch"), "--nodes", cluster.node_list, "--nproc", str(ranks)]
    words += ["--experiments", out.parent / "experiments", "--max-restarts", "1"]
    return [*words, *options, PROGRAM, out, str(alive)]


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
        if own and other and everyone[0].name == OURS:
            rows.append([shape, "ratio", f"{own / other:.2f}", ""])
    return table(["shape", "", "median", "from, to"], rows)


if __name__ == "__main__":
    main()
