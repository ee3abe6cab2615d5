"""Measure what a head takes to follow nodes that all print, line by line.

    python scripts/bench/chatter.py [--hosts 4 16] [--rate 50] [--seconds 20]      (root)

The hosts are those of scale.py. Each runs one program, which prints a step and a loss `--rate`
times a second. `head` is the share of a core that the head takes once all of them print; `delay`
is how old a line is when the head's command prints it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ground import machine, progress, require_own_network, show, table
from scale import Hosts, our, spent

PROGRAM = """import sys, time
step = 0
while True:
    step += 1
    print(f"step {step}/1000000 loss {1 / step:.5f} lr 1.0e-3 time {time.time()}", flush=True)
    time.sleep(1 / float(sys.argv[1]))
"""
START_SECONDS = 300.0


@dataclass(frozen=True)
class Found:
    """The cost of following this number of hosts."""

    hosts: int
    # The share of a core.
    head: float
    lines: float  # a second
    # Seconds from the print to the screen, of the median line.
    delay: float
    longest: float


class Listener(threading.Thread):
    """Reads the command's output, and notes how old each line of a rank is."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.process = process
        self.ages: list[float] = []
        self.printing: set[str] = set()  # nodes
        self.start()

    def run(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            who, found, said = line.partition(" time ")
            if found:
                self.ages.append(time.time() - float(said))
                self.printing.add(who.split(" ", 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what it takes to follow many lines.")
    parser.add_argument("--hosts", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--rate", type=float, default=50.0, help="lines a second of each host")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_own_network()
    found = []
    for size in options.hosts:
        progress(f"{size} hosts")
        with (
            tempfile.TemporaryDirectory() as directory,
            Hosts(size, Path(directory) / "hosts") as hosts,
        ):
            found.append(followed(hosts, options.rate, options.seconds))
    rows = [
        [
            str(one.hosts),
            f"{one.lines:.0f}",
            f"{one.head:.0%}",
            f"{one.delay * 1e3:.0f} ms",
            f"{one.longest * 1e3:.0f} ms",
        ]
        for one in found
    ]
    head = ["hosts", "lines a second", "head, of a core", "delay, p50", "p99"]
    show(
        options.json,
        f"{options.rate:g} lines a second of each host",
        machine(),
        table(head, rows),
        [vars(one) for one in found],
    )


def followed(hosts: Hosts, rate: float, seconds: float) -> Found:
    size = len(hosts.addresses)
    program = hosts.work / "chatter.py"
    program.write_text(PROGRAM)
    words = our(
        "master_launch",
        "--connect-timeout",
        "300",
        "--no-torchrun",
        "--sync",
        "off",
        str(program),
        str(rate),
    )
    process = subprocess.Popen(
        words,
        env=hosts.head_environment,
        cwd=hosts.work,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    listener = Listener(process)
    deadline = time.monotonic() + START_SECONDS
    while len(listener.printing) < size and process.poll() is None:
        if time.monotonic() > deadline:
            sys.exit(f"only {len(listener.printing)} of {size} hosts print")
        time.sleep(0.1)
    listener.ages.clear()
    before, began = spent(process.pid), time.monotonic()
    time.sleep(seconds)
    took, ages = time.monotonic() - began, sorted(listener.ages)
    share = (spent(process.pid) - before) / took
    subprocess.run(
        our("stop", "--now"),
        env=hosts.head_environment,
        cwd=hosts.work,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process.wait()
    return Found(
        size, share, len(ages) / took, statistics.median(ages), ages[int(len(ages) * 0.99)]
    )


if __name__ == "__main__":
    main()
