"""Measure what happens when something breaks, with ours, torchrunx and the DeepSpeed launcher.

    python scripts/bench/faults.py --peers DIR      (peers.py makes DIR)

Two hosts with two ranks each: a rank dies; a link is cut; the head is killed. Ours alone: the node
loss timeout, `stop --now` on 2, 8 and 64 hosts, log bytes lost over twenty cuts. The figures are
medians, with the aims in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ground import (
    PEERS,
    Cluster,
    Failed,
    Word,
    fresh,
    machine,
    on_head,
    our,
    progress,
    require_root,
    run,
    show,
    table,
    work_directory,
)

PROGRAM = "faulty.py"
RANKS = 2  # per host
# Seconds after which a fault counts as unnoticed.
NOTICE_LIMIT = 60.0
ORPHAN_SECONDS = 10.0
PATIENCE = 5.0
CUTS = 20
TORCHRUNX = """
import sys, torchrunx, faulty
hosts, ranks, out = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
launcher = torchrunx.Launcher(hostnames=hosts, workers_per_host=ranks, backend="gloo")
launcher.run(faulty.main, out)
"""


@dataclass
class Job:
    """A launcher's run of the program, ready on all ranks."""

    cluster: Cluster
    out: Path
    process: subprocess.Popen[bytes]
    said: Path

    def living(self) -> int:
        """Count the ranks that hold their lock."""
        return sum(held(path) for path in self.out.glob("alive_*"))

    def grew(self) -> int:
        return self.said.stat().st_size


def held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


Words = Callable[[Cluster, Path], list[Word]]


def main() -> None:
    options = parse()
    require_root()
    python = options.peers / "bin/python"
    about = machine(python)
    words: dict[str, Words] = {"orchestrator": ours(python if python.exists() else None)}
    if python.exists():
        words |= {"torchrunx": torchrunx(python), "deepspeed (pdsh)": deepspeed(python)}
    results: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.repeat):
        for name, made in words.items():
            for what, measure in (("death", death), ("cut", cut), ("orphans", orphans)):
                progress(f"{what}, {name}, turn {turn + 1} of {options.repeat}")
                found = measure(made, own=name == "orchestrator")
                for figure, value in found.items():
                    results.setdefault(name, {}).setdefault(figure, []).append(value)
    medians = {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        for name, figures in results.items()
    }
    progress("patience")
    own = {"patience": patience()}
    for size in (2, 8, 64):
        progress(f"stop on {size} hosts")
        own[f"stop {size}"] = stop(size)
    progress("cuts")
    own["lost bytes"] = lost_bytes()
    progress("")
    show(options.json, "When something breaks", about, render(medians, own), [medians, own])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break things and measure.")
    parser.add_argument("--peers", type=Path, default=PEERS, help="the venv that peers.py made")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# -- the contenders -------------------------------------------------------------------------------


def ours(python: Path | None, *more: str) -> Words:
    def words(cluster: Cluster, out: Path) -> list[Word]:
        found = [*our("master_launch"), "--nodes", cluster.node_list, "--nproc", str(RANKS)]
        found += ["--python", python or Path(sys.executable), *more]
        return [*found, "--experiments", out.parent / "experiments", PROGRAM, out]

    return words


def torchrunx(python: Path) -> Words:
    def words(cluster: Cluster, out: Path) -> list[Word]:
        return [python, "-c", TORCHRUNX, ",".join(cluster.addresses), str(RANKS), out]

    return words


def deepspeed(python: Path) -> Words:
    def words(cluster: Cluster, out: Path) -> list[Word]:
        hosts = out.parent / "hostfile"
        hosts.write_text("".join(f"{address} slots={RANKS}\n" for address in cluster.addresses))
        found: list[Word] = [python.with_name("deepspeed"), "--hostfile", hosts]
        found += ["--launcher", "pdsh", "--master_addr", cluster.addresses[0]]
        return [*found, "--no_local_rank", PROGRAM, out]

    return words


@contextlib.contextmanager
def started(words: Words, hosts: int = 2) -> Iterator[Job]:
    with fresh(hosts) as cluster:
        work = work_directory(cluster)
        shutil.copy(Path(__file__).with_name(PROGRAM), work)
        out = work / "out"
        out.mkdir()
        said = work / "said"
        with (
            said.open("wb") as file,
            on_head(cluster, words(cluster, out), file, file) as process,
        ):
            job = Job(cluster, out, process, said)
            until(lambda: len(list(out.glob("ready_*"))) == hosts * RANKS, 90, said)
            yield job


def until(done: Callable[[], bool], limit: float, said: Path | None = None) -> float:
    """Wait until the condition holds and return the seconds; Failed after the limit."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > limit:
            raise Failed(said.read_text() if said else f"not within {limit:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - began


# -- what breaks ----------------------------------------------------------------------------------


def death(words: Words, *, own: bool) -> Mapping[str, float]:
    """Measure from a rank's death until no rank lives and the command has returned."""
    with started(words) as job:
        (job.out / "die").touch()
        until(lambda: not held(job.out / "alive_1"), 10)
        began = time.monotonic()
        with contextlib.suppress(Failed):
            until(lambda: job.living() == 0 and job.process.poll() is not None, NOTICE_LIMIT)
        return {"death": time.monotonic() - began}


def cut(words: Words, *, own: bool) -> Mapping[str, float]:
    """Measure from a cut link until the screen says anything about it."""
    with started(words) as job:
        size = job.grew()
        job.cluster.cut(1)
        with contextlib.suppress(Failed):
            return {"cut": until(lambda: job.grew() > size, NOTICE_LIMIT)}
        return {"cut": float("inf")}


def orphans(words: Words, *, own: bool) -> Mapping[str, float]:
    """Count ranks that live ten seconds after kill -9 of the launcher and that nothing can end."""
    with started(words) as job:
        os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
        time.sleep(ORPHAN_SECONDS)
        found = job.living()
        # Our ranks should live on, as one command still ends them.
        if own:
            ended = [*our("orchestrator"), "stop", "--now", "--experiments"]
            run(job.cluster, [*ended, job.out.parent / "experiments"], silent=True)
            found = job.living()
        return {"orphans": found}


def patience() -> float:
    """Measure from the node loss timeout until nothing runs on the other node."""
    made = ours(None, "--node-loss-timeout", str(PATIENCE))
    with started(made) as job:
        job.cluster.cut(1)
        until(lambda: b"ending the job everywhere" in job.said.read_bytes(), 60, job.said)
        mine = [job.out / "alive_0", job.out / "alive_1"]
        return until(lambda: not any(map(held, mine)), 60)


def stop(hosts: int) -> float:
    """Measure `orchestrator stop --now`, from the command to its receipts."""

    def plain(cluster: Cluster, out: Path) -> list[Word]:
        found = ours(None, "--set", "launch.start=plain")(cluster, out)
        return [*found, "plain"]

    global RANKS  # noqa: PLW0603
    kept, RANKS = RANKS, RANKS if hosts < 64 else 1
    try:
        with started(plain, hosts) as job:
            words = [*our("orchestrator"), "stop", "--now", "--experiments"]
            began = time.monotonic()
            run(job.cluster, [*words, job.out.parent / "experiments"], silent=True)
            seconds = time.monotonic() - began
            if job.living():
                raise Failed(f"{job.living()} ranks live after the stop")
            return seconds
    finally:
        RANKS = kept


def lost_bytes() -> float:
    """Count the bytes missing on the head from a log whose node was cut off twenty times."""
    with fresh(2) as cluster:
        work = work_directory(cluster)
        (work / "prints.py").write_text(
            "import os, time\nfor n in range(4000):\n"
            "    print(os.environ['RANK'], n, 'x' * 200, flush=True)\n    time.sleep(0.01)\n"
        )
        words = [*our("master_launch"), "--nodes", cluster.node_list, "--quiet"]
        words += ["--experiments", work / "experiments", "prints.py"]
        with on_head(cluster, words, subprocess.DEVNULL, subprocess.DEVNULL) as process:
            time.sleep(2)
            for _ in range(CUTS):
                cluster.cut(1)
                time.sleep(0.5)
                cluster.restore(1)
                time.sleep(0.8)
            process.wait()
        (place,) = (work / "experiments").glob("[!.]*")
        lost = 0
        for node in range(2):
            (home,) = (place / "logs").glob(f"node_{node}_*.txt")
            (there,) = (cluster.home(node) / ".orchestrator/runs").glob("*/*/log")
            if digest(home) != digest(there):
                lost += abs(there.stat().st_size - home.stat().st_size) or 1
        return float(lost)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- the results ----------------------------------------------------------------------------------


def render(medians: Mapping[str, Mapping[str, float]], own: Mapping[str, float]) -> str:
    head = ["", *medians]
    names = {
        "death": "a rank dies: until all are gone and the command returns (1.5 s)",
        "cut": "a link is cut: until the screen says so (10 s)",
        "orphans": "ranks left after kill -9 of the launcher (0)",
    }
    rows = [
        [words, *(cell(found, figure) for found in medians.values())]
        for figure, words in names.items()
    ]
    text = table(head, rows)
    mine = [
        [
            "node loss timeout: until all that can be reached is ended (2 s)",
            f"{own['patience']:.2f} s",
        ]
    ]
    for size in (2, 8, 64):
        mine.append([f"stop --now with receipts, {size} hosts", f"{own[f'stop {size}']:.2f} s"])
    mine.append([f"log bytes lost over {CUTS} cuts (0)", f"{own['lost bytes']:.0f}"])
    return f"{text}\n\n{table(['orchestrator alone', ''], mine)}"


def cell(found: Mapping[str, Any], figure: str) -> str:
    value = found[figure]
    if figure == "orphans":
        return f"{value:.0f} of {2 * RANKS}"
    return f"{value:.2f} s" if value < NOTICE_LIMIT else f"nothing in {NOTICE_LIMIT:.0f} s"


if __name__ == "__main__":
    main()
