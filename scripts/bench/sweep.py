"""Measure a sweep of short programs on warm hosts: how long a slot is free between two members.

    python scripts/bench/sweep.py [--members 100] [--hosts 4] [--lasts 4] [--torchrun]

Each host has one slot. The program notes when it begins and ends; a gap is the time on one host
from the end of a member to the first line of the next. Also printed: what is left afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import ground
from ground import Failed, fresh, machine, our, require_root, run, seconds, show, table

NOTES = """
import os, socket, sys, time
began = time.time()
time.sleep(float(sys.argv[1]))
with open(sys.argv[2], "a") as file:
    file.write(f"{socket.gethostname()} {began} {time.time()}\\n")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--lasts", type=float, default=4.0, help="seconds that a member takes")
    parser.add_argument("--restarts", type=int, default=1, help="of a member that fails")
    parser.add_argument("--torchrun", action="store_true", help="start the members with torchrun")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    ground.LIMIT = 60.0 + options.members * (options.lasts + 5.0)
    about = machine(Path(sys.executable))
    with fresh(options.hosts) as cluster:
        found = swept(cluster, options)
    title = f"A sweep of {options.members} members on {options.hosts} hosts"
    rows = [
        ("a slot is free between two members, median", seconds(found["median"])),
        ("the longest of ten", seconds(found["ninth"])),
        ("all of it", seconds(found["whole"])),
        ("processes that are left", f"{found['left']:g}"),
    ]
    show(options.json, title, about, table(("", ""), rows), found)


def swept(cluster: ground.Cluster, options: argparse.Namespace) -> dict[str, float]:
    work = ground.work_directory(cluster)
    (work / "notes.py").write_text(NOTES)
    notes = work / "notes"
    orchestrator = [*our("orchestrator"), "sweep", "--json", "--nodes", cluster.node_list]
    how = [] if options.torchrun else ["--no-torchrun"]
    how += ["--max-restarts", str(options.restarts)]
    words = [*orchestrator, "--warm", "--nproc", "1", *how, "--as", "env"]
    program = ["--", "notes.py", f"{options.lasts:g}", str(notes)]
    run(cluster, [*words, "--grid", f"INDEX=0..{2 * options.hosts - 1}", *program])
    notes.unlink()
    began = time.monotonic()
    ran = run(cluster, [*words, "--grid", f"INDEX=0..{options.members - 1}", *program])
    whole = time.monotonic() - began
    said = json.JSONDecoder().raw_decode(ran.said[ran.said.index("{\n") :])[0]
    states = {member["state"] for member in said["members"]}
    spans = sorted(line.split() for line in notes.read_text().splitlines())
    if len(spans) != options.members or states != {"done"}:
        raise Failed(f"{len(spans)} programs ran, and members are {states}")
    hosts = {host for host, _, _ in spans}
    gaps = []
    for host in hosts:
        mine = sorted((float(began), float(ended)) for name, began, ended in spans if name == host)
        gaps += [after[0] - before[1] for before, after in itertools.pairwise(mine)]
    gaps.sort()
    run(cluster, [*our("orchestrator"), "nodes", "--warm", "off", "--nodes", cluster.node_list])
    left = sum(len(cluster.processes(i, "ORCHESTRATOR_JOB=")) for i in range(options.hosts))
    return {
        "median": statistics.median(gaps),
        "ninth": gaps[len(gaps) * 9 // 10],
        "whole": whole,
        "left": left,
    }


if __name__ == "__main__":
    main()
