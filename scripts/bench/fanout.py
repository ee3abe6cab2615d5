"""Measure how long `true` on many hosts takes: our connections, pdsh, clush and plain ssh.

    python scripts/bench/fanout.py

Cold is a fresh process that connects to all hosts; warm is the second `true` on open connections.
`orchestrator exec` is the whole command. `head` is the processor time of what was typed, with all
of its children, as the kernel counted it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ground import (
    ROOT,
    Cluster,
    Contender,
    Failed,
    Word,
    compete,
    first_line,
    machine,
    our,
    require_root,
    run,
    show,
    table,
)

WARM_ROUNDS = 5
COLD, WARM, PDSH = "ours, cold", "ours, warm", "pdsh -R ssh"
EXEC = "orchestrator exec"


def main() -> None:
    options = parse()
    require_root()
    about = f"{machine()}, {first_line('pdsh', '-V')}, {first_line('clush', '--version')}"
    results = {}
    for hosts in options.hosts:
        results[hosts] = contenders(hosts)
        compete(results[hosts], hosts, options.repeat, f"{hosts} hosts")
    title = f"`true` on all hosts (median of {options.repeat})"
    text = "\n\n".join(f"{what}\n\n{render(results, what)}" for what in ("seconds", "processor"))
    show(options.json, title, about, text, as_data(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 8, 32, 64])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def contenders(hosts: int) -> list[Contender]:
    def tool(name: str, words: Any) -> Contender:
        program = name.partition(" ")[0]
        missing = "" if shutil.which(program) else f"missing: {program}"
        return Contender(name, partial(timed, words), missing)

    # By default pdsh runs 32 at a time; this lets it run all.
    fanout = str(hosts)
    return [
        Contender(COLD, partial(timed, ours)),
        Contender(WARM, warm),
        Contender(EXEC, partial(timed, exec_true)),
        tool(PDSH, lambda c: ["pdsh", "-R", "ssh", "-S", "-f", fanout, "-w", listed(c), "true"]),
        tool("clush", lambda c: ["clush", "-S", "-f", fanout, "-w", listed(c), "true"]),
        tool("ssh & ... wait", in_parallel),
    ]


def listed(cluster: Cluster) -> str:
    return ",".join(cluster.addresses)


def in_parallel(cluster: Cluster) -> list[Word]:
    """Return the command of a shell script that does the same."""
    lines = "".join(f'ssh {address} true & all="$all $!"\n' for address in cluster.addresses)
    return ["bash", "-c", lines + "for one in $all; do wait $one || exit 1; done"]


def timed(words: Any, cluster: Cluster) -> Mapping[str, float]:
    command = words(cluster)
    started = time.perf_counter()
    ran = run(cluster, command)
    return {"seconds": time.perf_counter() - started, "processor": ran.processor}


def ours(cluster: Cluster, rounds: int = 1) -> list[Word]:
    python = ["env", f"PYTHONPATH={ROOT}", sys.executable]
    return [*python, __file__, "--as-head", str(cluster.node_list), str(rounds)]


def warm(cluster: Cluster) -> Mapping[str, float]:
    said = run(cluster, ours(cluster, 1 + WARM_ROUNDS)).said
    try:
        taken = json.loads(said)
    except ValueError:
        raise Failed(said) from None
    return {"seconds": sorted(taken[1:])[WARM_ROUNDS // 2]}


def exec_true(cluster: Cluster) -> list[Word]:
    return [*our("orchestrator"), "exec", "--nodes", cluster.node_list, "--", "true"]


# -- what runs on the head in a process of its own ----------------------------------------------


def as_head(node_list: str, rounds: str) -> None:
    """Connect to all hosts, run `true` on all several times, and print the seconds as JSON."""
    from orchestrator.common.errors import NodeError
    from orchestrator.head.connect import fleet
    from orchestrator.head.connect.ssh import SshTransport
    from orchestrator.head.connect.ssh_config import SshConfig
    from orchestrator.head.connect.transport import Connection
    from orchestrator.head.nodes.node_list import read_nodes
    from orchestrator.head.screen import failures

    nodes = read_nodes(Path(node_list))
    ssh = SshTransport(SshConfig(None))

    def true(connection: Connection) -> Connection:
        channel = connection.run("true", 10.0)
        if channel.recv_exit_status() != 0:
            raise NodeError("true is not true there")
        channel.close()
        return connection

    taken = []
    started = time.perf_counter()
    found = fleet.map_parallel(nodes, lambda node: true(ssh.connect(node)))
    connections = failures.results_or_error(nodes, found, "")
    taken.append(time.perf_counter() - started)
    for _ in range(int(rounds) - 1):
        started = time.perf_counter()
        failures.results_or_error(nodes, fleet.map_parallel(connections, true), "")
        taken.append(time.perf_counter() - started)
    print(json.dumps(taken), flush=True)
    # Our commands end like this as well: the connections close with the process.
    os._exit(0)


# -- the results --------------------------------------------------------------------------------


def render(results: Mapping[int, Sequence[Contender]], what: str) -> str:
    head = [""]
    for hosts in results:
        head += [f"{hosts} hosts", "of pdsh"]
    rows = []
    for index, one in enumerate(next(iter(results.values()))):
        row = [one.name]
        for everyone in results.values():
            reference = next(other for other in everyone if other.name == PDSH)
            row += cells(everyone[index], reference, what)
        rows.append(row)
    return table(head, rows)


def cells(one: Contender, reference: Contender, what: str) -> list[str]:
    value, best = one.median(what), reference.median(what)
    if value is None:
        return [one.missing, ""]
    return [f"{value:.3f} s", f"{value / best:.2f}" if best else ""]


def as_data(results: Mapping[int, Sequence[Contender]]) -> dict[str, Any]:
    return {
        str(hosts): {one.name: one.missing or one.samples for one in everyone}
        for hosts, everyone in results.items()
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-head"]:
        as_head(*sys.argv[2:])
    main()
