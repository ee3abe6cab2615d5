"""Measure how long the doctor takes: all checks on 8 hosts, the quick ones on 64.

    python scripts/bench/doctor.py

All checks are compared with the slowest host's own import of torch (all hosts at once, over plain
ssh), which they include [aim 1.5]; the quick ones with pdsh running `true` [aim 3].
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from ground import (
    Cluster,
    Contender,
    Word,
    compete,
    machine,
    our,
    require_root,
    run,
    seconds,
    show,
    table,
)

PLANS = {"all checks": 8, "quick checks": 64}
IMPORT = "import torch"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the doctor.")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    rows, data = [], {}
    for what, hosts in PLANS.items():
        found = contenders(what)
        compete(found, hosts, options.repeat, f"{what}, {hosts} hosts")
        ours, other = (one.median("seconds") for one in found)
        ratio = f"{ours / other:.2f}" if ours and other else found[1].missing
        rows.append([f"{what}, {hosts} hosts", seconds(ours), found[1].name, seconds(other), ratio])
        data[what] = {one.name: one.samples for one in found}
    head = ["", "orchestrator doctor", "compared with", "", "ratio"]
    title = f"The doctor (median of {options.repeat})"
    show(options.json, title, machine(), table(head, rows), data)


def contenders(what: str) -> list[Contender]:
    if what == "all checks":
        other = Contender("slowest import of torch", partial(timed, imports))
        return [Contender("doctor", partial(timed, doctor())), other]
    missing = "" if shutil.which("pdsh") else "missing: pdsh"
    return [
        Contender("doctor --quick", partial(timed, doctor("--quick"))),
        Contender("pdsh true", partial(timed, pdsh), missing),
    ]


def doctor(*words: str) -> Callable[[Cluster], list[Word]]:
    def command(cluster: Cluster) -> list[Word]:
        return [*our("orchestrator"), "doctor", *words, "--nodes", cluster.node_list]

    return command


def imports(cluster: Cluster) -> list[Word]:
    """Import torch on all hosts at once, as the doctor does; `wait` returns with the slowest."""
    command = shlex.quote(shlex.join([sys.executable, "-c", IMPORT]))
    line = f'ssh {{}} {command} & all="$all $!"\n'
    lines = "".join(line.format(address) for address in cluster.addresses)
    return ["bash", "-c", lines + "for one in $all; do wait $one || exit 1; done"]


def pdsh(cluster: Cluster) -> list[Word]:
    hosts = ",".join(cluster.addresses)
    return ["pdsh", "-R", "ssh", "-S", "-f", str(len(cluster.addresses)), "-w", hosts, "true"]


def timed(words: Callable[[Cluster], list[Word]], cluster: Cluster) -> Mapping[str, float]:
    started = time.perf_counter()
    run(cluster, words(cluster))
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()
