"""Measure what a command costs the head on 2 to 512 hosts, beside pdsh and clush.

    python scripts/bench/scale.py [--hosts 2 8 32 64 128 256 512] [--jobs 256] [--svg FILE]  (root)
    python scripts/bench/scale.py --hosts 32 --former DIR    beside another checkout, in turns

Each host is a real sshd at an address of its own; all have one home, as on a shared disk, so that
this machine holds our code once. Hosts and head share the processors, so `wall` is what all took.
`head` is the processor time of the head and its children alone, as the kernel counted it; memory,
threads and descriptors are its highest seen, bytes what went over the network. `followed` is a
launch of `sleep 2` until its end. Above `--jobs` hosts there is no job, as two cores do not start
so many in time, and pdsh and clush run once: with 512 each takes 80 s of processor.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log10
from pathlib import Path

from ground import ROOT, first_line, machine, progress, require_own_network, show, table

from orchestrator.local_cluster import cluster as local

LIMIT_SECONDS = 300.0
BESIDE = ("pdsh", "clush")
# All hosts start their Pythons on the cores of this machine.
PATIENT = ("--connect-timeout", "300")
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# Seconds between two reads of a command's processes.
TURN_SECONDS = 0.01
WIDTH, HEIGHT, EDGE = 720, 420, 56
COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#cc79a7", "#d55e00", "#e69f00", "#666666", "#000000")


@dataclass(frozen=True)
class Cost:
    """The cost of one run of a command."""

    wall: float
    # Processor seconds of the head.
    head: float
    memory_mb: float
    threads: int
    descriptors: int
    sent_mb: float  # both ways


class Hosts(local.LoopbackCluster):
    """Hosts at 127.0.x.y, as many as are wanted."""

    def __init__(self, size: int, directory: Path) -> None:
        super().__init__(1, directory, slots=1)
        self.addresses = [f"127.0.{i // 250}.{2 + i % 250}" for i in range(size)]
        # Separate from the files that the hosts write.
        self.work = self.directory / "work"
        self.work.mkdir(parents=True)

    def __enter__(self) -> Hosts:
        super().__enter__()
        return self

    def environment(self, node: local.LoopbackNode) -> dict[str, str]:
        return super().environment(self.nodes[0])

    def listener(self, node: local.LoopbackNode) -> list[str]:
        """Return a command with a PID namespace: a search for a job's processes sees one host."""
        return [*OWN_PIDS, *super().listener(node)]

    @property
    def head_environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ORCHESTRATOR_SSH_CONFIG": str(self.ssh_config),
            "ORCHESTRATOR_NODES": str(self.node_list),
            "ORCHESTRATOR_HOME": str(self.directory / "head"),
            "PDSH_SSH_ARGS_APPEND": f"-F {self.ssh_config}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what many hosts cost the head.")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 8, 32, 64, 128, 256, 512])
    parser.add_argument("--jobs", type=int, default=256, help="a job on at most so many hosts")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--former", type=Path, help="another checkout, with its .venv")
    parser.add_argument("--svg", type=Path, help="where the picture of the curves goes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_own_network()
    about = f"{machine()}, {first_line('pdsh', '-V')}, {first_line('clush', '--version')}"
    results: dict[int, dict[str, list[Cost]]] = {}
    for size in options.hosts:
        with (
            tempfile.TemporaryDirectory(prefix="orchestrator-scale-") as directory,
            Hosts(size, Path(directory) / "hosts") as hosts,
        ):
            results[size] = measured(
                hosts, options.repeat, options.former, with_job=size <= options.jobs
            )
    data = {
        size: {name: [asdict(cost) for cost in costs] for name, costs in found.items()}
        for size, found in results.items()
    }
    if options.svg:
        options.svg.write_text(picture(results))
    show(
        options.json,
        f"What hosts cost the head (median of {options.repeat})",
        about,
        render(results),
        data,
    )


def measured(
    hosts: Hosts, repeat: int, former: Path | None, *, with_job: bool
) -> dict[str, list[Cost]]:
    """Run each command in turn, after a first round that only warms caches."""
    found: dict[str, list[Cost]] = {}
    for turn in range(repeat + 1):
        for name, words in commands(hosts).items():
            if name in BESIDE and not with_job and turn != repeat:
                continue
            take(hosts, name, words, found, counts=turn > 0)
        if with_job:
            job(hosts, found, counts=turn > 0)
            followed(hosts, ROOT, "followed", found, counts=turn > 0)
            if former:
                followed(hosts, former, "followed, former", found, counts=turn > 0)
        if former:
            words = [str(former / ".venv/bin/orchestrator"), "exec", *PATIENT, "--", "true"]
            take(hosts, "exec, former", words, found, root=former, counts=turn > 0)
    return found


def commands(hosts: Hosts) -> dict[str, list[str]]:
    everyone, size = ",".join(hosts.addresses), str(len(hosts.addresses))
    clush = ["clush", "-S", "-f", size, "-o", f"-F {hosts.ssh_config}", "-w", everyone, "true"]
    return {
        "exec": our("exec", *PATIENT, "--", "true"),
        "nodes": our("nodes", *PATIENT),
        "pdsh": ["pdsh", "-R", "ssh", "-S", "-f", size, "-w", everyone, "true"],
        "clush": clush,
    }


def job(hosts: Hosts, found: dict[str, list[Cost]], *, counts: bool) -> None:
    """Start a job without torch on all hosts, look at it, and stop it."""
    launch = our(
        "master_launch", *PATIENT, "--detach", "--no-torchrun", "--sync", "off", "sleep", "600"
    )
    take(hosts, "launch", launch, found, counts=counts)
    take(hosts, "status", our("status"), found, counts=counts)
    take(hosts, "stop", our("stop", "--now"), found, counts=counts)


def followed(
    hosts: Hosts, root: Path, name: str, found: dict[str, list[Cost]], *, counts: bool
) -> None:
    """Launch a job without torch on all hosts and follow it to its end."""
    program = root / ".venv/bin/master_launch" if root != ROOT else our("master_launch")[0]
    words = [str(program), *PATIENT, "--no-torchrun", "--sync", "off", "sleep", "2"]
    take(hosts, name, words, found, root=root, counts=counts)


def our(command: str, *words: str) -> list[str]:
    program = Path(sys.executable).with_name("orchestrator")
    if command == "master_launch":
        return [str(program.with_name(command)), *words]
    return [str(program), command, *words]


def take(
    hosts: Hosts,
    name: str,
    words: Sequence[str],
    found: dict[str, list[Cost]],
    *,
    root: Path = ROOT,
    counts: bool,
) -> Cost | None:
    """Run a command once and keep what it took; one that failed or is not there has no figures."""
    progress(f"{len(hosts.addresses)} hosts: {name}")
    if not shutil.which(words[0]):
        return None
    cost = run(hosts, words, root)
    if cost is None:
        print(f"\n{len(hosts.addresses)} hosts: {name} failed", file=sys.stderr)
    elif counts:
        found.setdefault(name, []).append(cost)
    return cost


def run(hosts: Hosts, words: Sequence[str], root: Path) -> Cost | None:
    before, began = sent(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            words,
            env={**hosts.head_environment, "PYTHONPATH": str(root)},
            cwd=hosts.work,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        highest = Highest(process.pid)
        limit = threading.Timer(LIMIT_SECONDS, process.kill)
        limit.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        limit.cancel()
        highest.over.set()
        highest.join()
        if process.returncode:
            said.seek(0)
            print(said.read()[-2000:], file=sys.stderr)
            return None
    return Cost(
        wall=time.perf_counter() - began,
        head=usage.ru_utime + usage.ru_stime,
        memory_mb=highest.memory_kb / 1024,
        threads=highest.threads,
        descriptors=highest.descriptors,
        sent_mb=(sent() - before) / 1e6,
    )


class Highest(threading.Thread):
    """Looks at a command and its children until it is over, and keeps the highest figures."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.memory_kb = self.threads = self.descriptors = 0
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(TURN_SECONDS):
            looked = [look for pid in family(self.pid) if (look := state(pid))]
            for name, values in zip(
                ("memory_kb", "threads", "descriptors"), zip(*looked, strict=True), strict=False
            ):
                setattr(self, name, max(getattr(self, name), sum(values)))


def family(pid: int) -> list[int]:
    """Return a process and its children's children."""
    found = [pid]
    for listed in Path("/proc").glob(f"{pid}/task/*/children"):
        # The thread may have ended.
        with contextlib.suppress(OSError):
            found += [one for child in listed.read_text().split() for one in family(int(child))]
    return found


def state(pid: int) -> tuple[int, int, int] | None:
    """Return the private memory of a process in KiB, its threads, and its descriptors."""
    try:
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return int(fields["RssAnon"].split()[0]), int(fields["Threads"]), descriptors
    except (OSError, KeyError):
        # The process has ended.
        return None


def spent(pid: int) -> float:
    """Return the seconds of processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sent() -> int:
    """Return the bytes that have gone over the loopback of this namespace."""
    [line] = (line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split()[1])


# -- the results --------------------------------------------------------------------------------


def medians(costs: Sequence[Cost]) -> dict[str, float]:
    return {
        name: statistics.median(getattr(cost, name) for cost in costs) for name in vars(costs[0])
    }


def render(results: Mapping[int, Mapping[str, Sequence[Cost]]]) -> str:
    rows = []
    for size, found in results.items():
        for name, costs in found.items():
            cost = medians(costs)
            rows.append(
                [
                    str(size),
                    name,
                    f"{cost['wall']:.2f} s",
                    f"{cost['head']:.2f} s",
                    f"{1000 * cost['head'] / size:.1f} ms",
                    f"{cost['memory_mb']:.0f} MB",
                    f"{cost['threads']:.0f}",
                    f"{cost['descriptors']:.0f}",
                    f"{cost['sent_mb']:.2f} MB",
                ]
            )
    head = [
        "hosts",
        "command",
        "wall",
        "head",
        "a host",
        "memory",
        "threads",
        "descriptors",
        "sent",
    ]
    return table(head, rows)


def picture(results: Mapping[int, Mapping[str, Sequence[Cost]]]) -> str:
    """Draw the head's processor seconds by hosts, both logarithmic, a line for each command."""
    sizes = list(results)
    names = dict.fromkeys(name for found in results.values() for name in found)
    seconds = {
        name: [
            (size, medians(found[name])["head"])
            for size, found in results.items()
            if found.get(name)
        ]
        for name in names
    }
    top = max(value for line in seconds.values() for _, value in line)
    low, high = -1.0, log10(top) + 0.1

    def x(size: float) -> float:
        share = log10(size / sizes[0]) / max(log10(sizes[-1] / sizes[0]), 1e-9)
        return EDGE + share * (WIDTH - 2 * EDGE - 60)

    def y(value: float) -> float:
        return HEIGHT - EDGE - (log10(value) - low) / (high - low) * (HEIGHT - 2 * EDGE)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12" role="img">',
        "<title>Processor seconds of the head by number of hosts</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for size in sizes:
        parts.append(
            f'<text x="{x(size):.0f}" y="{HEIGHT - 34}" text-anchor="middle">{size}</text>'
        )
    for tenth in (0.1, 1.0, 10.0, 100.0):
        if tenth <= 10**high:
            parts.append(
                f'<path d="M{EDGE} {y(tenth):.1f}H{WIDTH - EDGE - 60}" stroke="#ddd"/>'
                f'<text x="{EDGE - 6}" y="{y(tenth) + 4:.1f}" text-anchor="end">{tenth:g} s</text>'
            )
    coloured = dict(zip(seconds, COLOURS, strict=False))
    below = float(HEIGHT)
    # The lowest line comes first.
    for name, line in sorted(seconds.items(), key=lambda item: item[1][-1][1]):
        colour = coloured[name]
        points = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        size, value = line[-1]
        below = min(y(value) + 4, below - 14)
        parts.append(f'<text x="{x(size) + 6:.1f}" y="{below:.1f}" fill="{colour}">{name}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">hosts</text>'
        f'<text x="{EDGE}" y="22">processor seconds of the head, by hosts</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
