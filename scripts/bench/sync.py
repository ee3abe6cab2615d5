"""Compare how a working tree reaches nodes with as many `rsync -az` at once.

    python scripts/bench/sync.py [--nodes 1 4 16] [--files 5000] [--megabytes 200] [--json]

The nodes are sshd on loopback addresses of this machine, each with a store of its own. Both sides
connect first: a process of ours reads the tree, connects, sends and makes a snapshot on each node;
one rsync per node, all at once, copies into a directory of its own. First to empty nodes, then
again, then after one file was edited. "In a launch" is what the transfer adds where the connections
are open anyhow; who copies with rsync still has to launch.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ground import first_line, machine, show, table

from orchestrator.local_cluster.cluster import LoopbackCluster

WORDS = [f"{word}{number}" for word in ("self", "return", "for", "x", "=") for number in range(99)]
OURS = """
import os, sys, time
from pathlib import Path
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.start.code import begin_scan, bring_code
from orchestrator.head.start.nodes import try_nodes
from orchestrator.head.start.request import resolve_request
nodes, config = map(Path, sys.argv[1:3])
request = resolve_request(LaunchArguments(
    program=("0/file_0.py",), overrides=tuple(sys.argv[3:]), launch={"sync": "always"},
    where=Where(nodes=nodes, ssh_config=config),
))
scan = begin_scan(request)
answered = try_nodes(request)
assert not answered.lost, answered.lost
began = time.monotonic()
bring_code(request, answered.reached, len(answered.reached), scan)
print(time.monotonic() - began, flush=True)
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the transfer of code.")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("rsync") is None:
        sys.exit("there is no rsync to compare with: apt-get install rsync")
    found = {}
    for count in options.nodes:
        with tempfile.TemporaryDirectory() as place:
            found[count] = measure(count, Path(place), options)
    rows = [
        [
            *(f"{count}", what, f"{ours:.2f} s", f"{added:.2f} s", f"{rsync:.2f} s"),
            *(f"{ours / rsync:.2f}", f"{added / rsync:.2f}"),
        ]
        for count, times in found.items()
        for what, (ours, added, rsync) in times.items()
    ]
    heads = ["nodes", "transfer", "ours", "in a launch", "rsync -az", "ratio", "in a launch"]
    text = table(heads, rows)
    data = {str(count): times for count, times in found.items()}
    about = f"{machine(Path(sys.executable))}, {first_line('rsync', '--version')}"
    title = f"{options.files} files, {options.megabytes} MB (median of {options.repeat})"
    show(options.json, title, about, text, data)


def measure(count: int, place: Path, options: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    tree = place / "tree"
    write(tree, options.files, options.megabytes * 1_000_000)
    with LoopbackCluster(count, place / "cluster") as cluster:
        samples: dict[str, list[tuple[float, ...]]] = {"first": [], "again": [], "one edit": []}
        for number in range(options.repeat):
            for node in cluster.nodes:
                shutil.rmtree(node.state / "code", ignore_errors=True)
            shutil.rmtree(place / "copies", ignore_errors=True)
            for what, times in samples.items():
                if what == "one edit":
                    (tree / "0/file_0.py").write_text(f"# edit {number}")
                times.append((*ours(cluster, tree, place), rsync(cluster, tree, place)))
    return {
        what: tuple(map(statistics.median, zip(*times, strict=True)))
        for what, times in samples.items()
    }


def write(tree: Path, count: int, size: int) -> None:
    """Write files that compress as source does, each one comment: a launch reads the program."""
    dice = random.Random(1)
    for number in range(count):
        path = tree / f"{number // 100}" / f"file_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = " ".join(dice.choices(WORDS, k=size // count // 5))
        path.write_text(f"# {text}"[: size // count])
    # A launch does not remember files that changed within the last second.
    time.sleep(1.1)


def ours(cluster: LoopbackCluster, tree: Path, place: Path) -> tuple[float, float]:
    """Return the seconds of a whole process, and of the transfer in it."""
    began = time.monotonic()
    words = [sys.executable, "-c", OURS, str(cluster.node_list), str(cluster.ssh_config)]
    env = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.monotonic() - began, float(done.stdout.split()[-1])


def rsync(cluster: LoopbackCluster, tree: Path, place: Path) -> float:
    began = time.monotonic()
    (place / "copies").mkdir(exist_ok=True)
    shell = f"ssh -F {cluster.ssh_config}"
    running = []
    for number, node in enumerate(cluster.nodes):
        where = f"{node.address}:{place}/copies/{number}/"
        running.append(subprocess.Popen(["rsync", "-az", "-e", shell, f"{tree}/", where]))
    if sum(process.wait() for process in running):
        sys.exit("rsync failed")
    return time.monotonic() - began


if __name__ == "__main__":
    main()
