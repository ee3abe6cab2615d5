"""Measure how long a call in all ranks of a pool takes, and what thousands of calls leave behind.

    python scripts/bench/calls.py

The call is a method of an object that every rank has (cluster.pool, 2x2). Beside it, in turns: the
same call as a job of its own (cluster.run), and the limit, 100 bytes to every node and back through
`ssh node cat` on open connections.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ground import (
    ROOT,
    Cluster,
    Contender,
    Failed,
    compete,
    machine,
    require_root,
    run,
    show,
    table,
)

CALLS, MANY = 1000, 10_000
HOSTS, RANKS = 2, 2


def main() -> None:
    options = parse()
    require_root()
    ways = [
        Contender("a method in all ranks of a pool", partial(typed, "pool", CALLS)),
        Contender("`ssh node cat`, both nodes", partial(typed, "ssh", CALLS)),
        Contender("cluster.run", partial(typed, "run", 1)),
    ]
    many = Contender(f"{MANY} calls", partial(typed, "pool", MANY))
    compete(ways, HOSTS, options.repeat, "calls")
    compete([many], HOSTS, 1, "many calls")
    rows = [
        [way.name, *(way.missing or milliseconds(way.median(name)) for name in ("p50", "p99"))]
        for way in ways
    ]
    text = table(["one call", "p50", "p99"], rows)
    grown = {name: many.median(name) for name in ("ranks_kb", "caller_kb")}
    text += f"\n\nMemory after {MANY} calls beside that after 100: {grown}"
    data = {way.name: way.samples for way in (*ways, many)}
    show(options.json, f"Calls, {HOSTS}x{RANKS}", machine(), text, data)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.2f} ms"


def typed(what: str, calls: int, cluster: Cluster) -> Mapping[str, float]:
    python = ["env", f"PYTHONPATH={ROOT}", sys.executable]
    words = [*python, __file__, "--as-head", what, str(cluster.node_list), str(calls)]
    said = run(cluster, [*words, *cluster.addresses]).said
    try:
        figures: Mapping[str, float] = json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):
        raise Failed(said) from None
    return figures


# -- what runs on the head in a process of its own ----------------------------------------------


def as_head(what: str, node_list: str, calls: str, *addresses: str) -> None:
    ways: dict[str, Callable[..., Mapping[str, float]]] = {"pool": pool, "ssh": ssh, "run": once}
    print(json.dumps(ways[what](node_list, int(calls), *addresses)))


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def pool(node_list: str, calls: int, *addresses: str) -> Mapping[str, float]:
    from orchestrator import Cluster as Nodes

    with Nodes(node_list, nproc=RANKS).pool() as pool:
        counter = pool.create(Counter)
        timed(lambda: counter.add(1), 100)
        before, here = pool.run(memory), memory()
        figures = timed(lambda: counter.add(1), calls)
        grown = [after - then for after, then in zip(pool.run(memory), before, strict=True)]
        return {**figures, "ranks_kb": max(grown), "caller_kb": memory() - here}


def ssh(node_list: str, calls: int, *addresses: str) -> Mapping[str, float]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    nodes = [subprocess.Popen(["ssh", address, "cat"], **pipes) for address in addresses]

    def there_and_back() -> None:
        for node in nodes:
            os.write(node.stdin.fileno(), b"x" * 100)
        for node in nodes:
            os.read(node.stdout.fileno(), 100)

    timed(there_and_back, 100)
    figures = timed(there_and_back, calls)
    for node in nodes:
        node.kill()
    return figures


def once(node_list: str, calls: int, *addresses: str) -> Mapping[str, float]:
    from orchestrator import Cluster as Nodes

    nodes = Nodes(node_list, nproc=RANKS)
    return timed(lambda: nodes.run(abs, -1), calls)


def timed(call: Callable[[], object], calls: int) -> Mapping[str, float]:
    taken = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    taken.sort()
    return {"p50": statistics.median(taken), "p99": taken[int(0.99 * len(taken))]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-head"]:
        as_head(*sys.argv[2:])
    else:
        main()
