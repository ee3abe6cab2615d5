"""Compare how code reaches many nodes: ours, from the head alone, with rsync, with clush --copy.

    sudo -E python scripts/bench/uplink.py [--nodes 4 16] [--rate 100mbit] [--megabytes 40] [--json]
    sudo -E python scripts/bench/uplink.py --nodes 16 64 142 --rate "" --megabytes 136 --one-edit

The nodes are network namespaces of this machine with an sshd each; `tc tbf` limits what leaves the
head. Nothing is on the nodes before. Our connections are open, and `with logins` has the whole
process. The bytes are those of the head's link; `head` is the processor time of our process, or of
all rsyncs and sshs there. `cp` copies within this machine, without a network or a checksum: no way
can take less. With `--one-edit` each is repeated after one file was changed; then once more where
our head does not know which list of files the nodes have.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ground import machine, progress, require_root, show, table
from sync import OURS, write

from tests.clusters.netns import NetnsCluster

FANOUT = {"from the head alone": "off", "from node to node": "auto"}
WAYS = (*FANOUT, "rsync", "clush", "cp")
WHOLE = "one edit, whole list"  # nobody knows which list the nodes have
EDITS = ("one edit", WHOLE)
COPIES = "copies"  # in each home


class Cost(NamedTuple):
    """What one transfer took."""

    seconds: float  # until all have it
    with_logins: float
    megabytes: float  # that left the head
    head: float  # processor seconds


class Late(Exception):
    """A transfer took longer than the limit."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the transfer of code over an uplink.")
    parser.add_argument("--nodes", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rate", default="100mbit", help="'' for no limit")
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--one-edit", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one transfer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    found = {}
    for count in options.nodes:
        with tempfile.TemporaryDirectory(prefix="orchestrator-uplink-") as place:
            found[count] = measure(count, Path(place), options)
    progress("")
    rows = [row(count, *name, cost) for count, ways in found.items() for name, cost in ways.items()]
    head = ["nodes", "way", "what", "until all have it", "with logins", "left the head", "head"]
    data = {
        str(count): {" ".join(name): cost and cost._asdict() for name, cost in ways.items()}
        for count, ways in found.items()
    }
    at = f" at {options.rate}" if options.rate else ""
    title = f"{options.files} files, {options.megabytes} MB{at} (median of {options.repeat})"
    show(options.json, title, machine(Path(sys.executable)), table(head, rows), data)


def row(count: int, way: str, what: str, cost: Cost | None) -> list[str]:
    if cost is None:
        return [str(count), way, what, "not in time", "", "", ""]
    return [
        *(str(count), way, what, f"{cost.seconds:.1f} s", f"{cost.with_logins:.1f} s"),
        *(f"{cost.megabytes:.1f} MB", f"{cost.head:.1f} s"),
    ]


def measure(
    count: int, place: Path, options: argparse.Namespace
) -> dict[tuple[str, str], Cost | None]:
    tree = place / "tree"
    write(tree, options.files, options.megabytes * 1_000_000)
    samples: dict[tuple[str, str], list[Cost]] = {}
    with NetnsCluster(count, place / "cluster") as cluster:
        link = f"orc{cluster.addresses[0].split('.')[2]}"
        if options.rate:
            shape = f"tbf rate {options.rate} burst 256kb latency 400ms"
            words = ["tc", "qdisc", "replace", "dev", link, "root", *shape.split()]
            subprocess.run(words, check=True)
        late: set[str] = set()
        for turn in range(options.repeat):
            for way in options.ways:
                for node in range(count):
                    shutil.rmtree(cluster.run_home(node) / "code", ignore_errors=True)
                    shutil.rmtree(cluster.home(node) / COPIES, ignore_errors=True)
                for what in ("first", *EDITS) if options.one_edit else ("first",):
                    if what in EDITS:
                        (tree / "0/file_0.py").write_text(f"{what} {turn} {way}")
                    if what == WHOLE:
                        for note in (place / "cache").rglob("*.list"):
                            note.unlink()
                    progress(f"{count} nodes, round {turn}: {way}, {what}")
                    costs = samples.setdefault((way, what), [])
                    try:
                        if way not in late:
                            costs.append(carry(cluster, link, way, tree, place, options.limit))
                    except Late:
                        late.add(way)
    return {
        name: Cost(*map(statistics.median, zip(*costs, strict=True))) if costs else None
        for name, costs in samples.items()
    }


def sent(link: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def carry(
    cluster: NetnsCluster, link: str, way: str, tree: Path, place: Path, limit: float
) -> Cost:
    """Bring the tree to all nodes, in one way."""
    ways: dict[str, Callable[[], float | None]] = {
        "rsync": lambda: rsync(cluster, tree, limit),
        "clush": lambda: clush(cluster, tree, limit),
        "cp": lambda: cp(cluster, tree),
    }
    before, used, began = sent(link), children(), time.monotonic()
    if way in ways:
        seconds = ways[way]()
    else:
        seconds = transfer(cluster, tree, place, f"sync.fanout={FANOUT[way]}", limit)
    whole = time.monotonic() - began
    size = (sent(link) - before) / 1e6
    return Cost(whole if seconds is None else seconds, whole, size, children() - used)


def children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def transfer(cluster: NetnsCluster, tree: Path, place: Path, setting: str, limit: float) -> float:
    """Return the seconds until every node has its snapshot."""
    words = [sys.executable, "-c", OURS, str(cluster.node_list), str(cluster.ssh_config), setting]
    env = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    try:
        done = subprocess.run(
            words, cwd=tree, env=env, capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise Late from None
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return float(done.stdout)


def rsync(cluster: NetnsCluster, tree: Path, limit: float) -> None:
    shell = f"ssh -F {cluster.ssh_config}"
    deadline = time.monotonic() + limit
    running = []
    for address in cluster.addresses:
        words = ["rsync", "-az", "-e", shell, f"{tree}/", f"{address}:{COPIES}/"]
        running.append(subprocess.Popen(words))
    ended(running, deadline)


def clush(cluster: NetnsCluster, tree: Path, limit: float) -> None:
    everyone, size = ",".join(cluster.addresses), str(len(cluster.addresses))
    words = ["clush", "-S", "-f", size, "-o", f"-F {cluster.ssh_config}", "-w", everyone]
    home = f"{cluster.home_path}/{COPIES}"
    deadline = time.monotonic() + limit
    ended([silent([*words, "mkdir", "-p", home])], deadline)
    words += ["--copy", str(tree), "--dest", home]
    ended([silent(words)], deadline)


def cp(cluster: NetnsCluster, tree: Path) -> None:
    """Copy the tree to each home, as many at once as there are processors."""
    places = [cluster.home(node) / COPIES for node in range(len(cluster.addresses))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(partial(shutil.copytree, tree, dirs_exist_ok=True), places))


def silent(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ended(running: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait for processes; those that are late are killed."""
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in running]
    except subprocess.TimeoutExpired:
        for process in running:
            process.kill()
            process.wait()
        raise Late from None
    if any(codes):
        raise Late


if __name__ == "__main__":
    main()
