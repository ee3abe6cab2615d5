"""Compare how code reaches nodes over a slow uplink of the head: directly, and from node to node.

    sudo -E python scripts/bench/uplink.py [--nodes 4 16] [--rate 100mbit] [--megabytes 40] [--json]

The nodes are network namespaces of this machine with an sshd each; `tc tbf` limits what leaves the
head. Nothing is on the nodes before; connections are open. The bytes are those of the head's link.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ground import machine, require_root, show, table
from sync import OURS, write

from tests.clusters.netns import NetnsCluster

WAYS = {"directly": "off", "from node to node": "3"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the transfer of code over an uplink.")
    parser.add_argument("--nodes", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    found = {}
    for count in options.nodes:
        with tempfile.TemporaryDirectory() as place:
            found[count] = measure(count, Path(place), options)
    rows = [
        [f"{count}", way, f"{seconds:.1f} s", f"{size / 1e6:.1f} MB"]
        for count, ways in found.items()
        for way, (seconds, size) in ways.items()
    ]
    text = table(["nodes", "way", "until all have it", "left the head"], rows)
    data = {str(count): ways for count, ways in found.items()}
    title = f"{options.files} files, {options.megabytes} MB at {options.rate}"
    about = machine(Path(sys.executable))
    show(options.json, f"{title} (median of {options.repeat})", about, text, data)


def measure(count: int, place: Path, options: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    tree = place / "tree"
    write(tree, options.files, options.megabytes * 1_000_000)
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with NetnsCluster(count, place / "cluster") as cluster:
        link = f"orc{cluster.addresses[0].split('.')[2]}"
        shape = f"tbf rate {options.rate} burst 256kb latency 400ms"
        words = ["tc", "qdisc", "replace", "dev", link, "root", *shape.split()]
        subprocess.run(words, check=True)
        for _ in range(options.repeat):
            for way, times in samples.items():
                for node in range(count):
                    shutil.rmtree(cluster.run_home(node) / "code", ignore_errors=True)
                before = sent(link)
                seconds = transfer(cluster, tree, place, f"sync.fanout={WAYS[way]}")
                times.append((seconds, sent(link) - before))
    return {
        way: tuple(map(statistics.median, zip(*times, strict=True)))
        for way, times in samples.items()
    }


def sent(link: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def transfer(cluster: NetnsCluster, tree: Path, place: Path, setting: str) -> float:
    """Return the seconds until every node has its snapshot."""
    words = [sys.executable, "-c", OURS, str(cluster.node_list), str(cluster.ssh_config), setting]
    env = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return float(done.stdout)


if __name__ == "__main__":
    main()
