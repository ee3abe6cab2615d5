"""Measure the rate and the delay of logs on their way to the head: ours against ssh.

    python scripts/bench/logs.py

Three questions. A finished log on the node: `orchestrator attach` against `ssh node cat`. A job
that prints lines as fast as it can: master_launch against the same program run by ssh. A line now
and then: the time from the rank's print until it can be read from the command's output.
Every byte that arrives is compared with what was printed.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lines
from ground import (
    Cluster,
    Contender,
    Failed,
    Word,
    compete,
    done_well,
    first_line,
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

PROGRAM = "lines.py"
NODES = (1, 8)
DELAY_LINES, DELAY_PAUSE = 1000, 0.005
TIME = re.compile(rb"\d{10}\.\d+")
SMALL_MEGABYTES = 16
LINES_PER_MEGABYTE = 1_000_000 // len(lines.LINE)


def main() -> None:
    options = parse()
    require_root()
    about = machine()
    finished, live = {}, {}
    for nodes in NODES:
        share = options.megabytes * LINES_PER_MEGABYTE // nodes
        finished[nodes], live[nodes] = finished_contenders(share), live_contenders(share)
        compete(finished[nodes], nodes, options.repeat, f"finished log, {nodes} nodes")
        compete(live[nodes], nodes, options.repeat, f"live log, {nodes} nodes")
    delays = delay_contenders()
    compete(delays, 1, options.repeat, "delay")
    memory = {size: peak_memory(size) for size in (SMALL_MEGABYTES, options.memory_megabytes)}
    text = "\n\n".join(
        [
            rates("A finished log on the node, to the local file", finished, options.megabytes),
            rates("A job that is printing, to the local file", live, options.megabytes),
            delay_table(delays),
            "The head's peak memory while it attaches to a log of "
            + ", ".join(f"{size} MB: {peak}" for size, peak in memory.items()),
        ]
    )
    data = {
        "finished": as_data(finished),
        "live": as_data(live),
        "delay": {one.name: one.missing or one.samples for one in delays},
        "peak": memory,
    }
    show(options.json, f"Logs (median of {options.repeat})", about, text, data)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=512, help="from all nodes together")
    parser.add_argument("--memory-megabytes", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# -- a finished log -----------------------------------------------------------------------------


def finished_contenders(share: int) -> list[Contender]:
    return [
        Contender("ssh NODE cat LOG > FILE", partial(cat, share)),
        Contender("orchestrator attach --quiet", partial(attach, ["--quiet"], share)),
        Contender("orchestrator attach", partial(attach, [], share)),
    ]


def cat(share: int, cluster: Cluster) -> Mapping[str, float]:
    logs = finished_logs(cluster, share)
    copies = [work_directory(cluster) / f"copy_{i}" for i in range(cluster.size)]
    home = Path(cluster.home_path)
    there = [home / log.relative_to(cluster.home(i)) for i, log in enumerate(logs)]
    started = time.time()
    through_ssh(cluster, [f"cat {path}" for path in there], copies)
    same(copies, logs)
    return arrived(copies, share, started)


def attach(options: Sequence[str], share: int, cluster: Cluster) -> Mapping[str, float]:
    """Attach to the detached job, in the state in which its launch left it."""
    logs = finished_logs(cluster, share)
    experiments, saved = experiments_of(cluster), work_directory(cluster) / "saved"
    shutil.rmtree(experiments)
    shutil.copytree(saved, experiments)
    words = [*our("orchestrator"), "attach", "--experiments", experiments, *options]
    started = time.time()
    ran = run(cluster, words, silent=True)
    same(local_logs(cluster), logs)
    return arrived(local_logs(cluster), share, started) | {"peak_kb": ran.peak_kb}


def finished_logs(cluster: Cluster, share: int) -> list[Path]:
    """Return the logs of a detached job that has ended since; made once per cluster."""
    saved = work_directory(cluster) / "saved"
    if not saved.exists():
        run(cluster, launch_words(cluster, ["--detach"], "lines", share, 0.0))
        for i in range(cluster.size):
            wait_for(lambda i=i: has_ended(cluster, i))  # type: ignore[misc]
        shutil.copytree(experiments_of(cluster), saved)
    return node_logs(cluster)


def node_logs(cluster: Cluster) -> list[Path]:
    everyone = range(cluster.size)
    return [one_file(cluster.home(i), f".orchestrator/runs/*/{i}/*/log") for i in everyone]


def has_ended(cluster: Cluster, i: int) -> bool:
    events = list(cluster.home(i).glob(f".orchestrator/runs/*/{i}/*/events.jsonl"))
    return bool(events) and '"event": "ended"' in events[0].read_text()


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"not done after {seconds:.0f} s")
        time.sleep(0.05)


# -- a log as it grows --------------------------------------------------------------------------


def live_contenders(share: int) -> list[Contender]:
    return [
        Contender("ssh NODE python lines.py > FILE", partial(live_ssh, share)),
        Contender("master_launch --quiet", partial(live_ours, ["--quiet"], share)),
        Contender("master_launch", partial(live_ours, [], share)),
    ]


def live_ssh(share: int, cluster: Cluster) -> Mapping[str, float]:
    put_program(cluster)
    copies = [work_directory(cluster) / f"copy_{i}" for i in range(cluster.size)]
    command = shlex.join([sys.executable, *program_words(cluster, "lines", share, 0.0)])
    through_ssh(cluster, [command] * cluster.size, copies)
    return arrived(copies, share, first_print(cluster))


def live_ours(options: Sequence[str], share: int, cluster: Cluster) -> Mapping[str, float]:
    shutil.rmtree(experiments_of(cluster), ignore_errors=True)
    for i in range(cluster.size):
        shutil.rmtree(cluster.home(i) / ".orchestrator/runs", ignore_errors=True)
    ran = run(cluster, launch_words(cluster, options, "lines", share, 0.0), silent=True)
    same(local_logs(cluster), node_logs(cluster))
    found = arrived(local_logs(cluster), share, first_print(cluster))
    return found | {"peak_kb": ran.peak_kb}


def first_print(cluster: Cluster) -> float:
    notes = work_directory(cluster).glob("first_*")
    return min(float(note.read_text()) for note in notes)


# -- what both have in common -------------------------------------------------------------------


def put_program(cluster: Cluster) -> None:
    shutil.copy(Path(__file__).with_name(PROGRAM), work_directory(cluster))


def program_words(cluster: Cluster, what: str, count: int, pause: float) -> list[str]:
    work = work_directory(cluster)
    return [str(work / PROGRAM), what, str(count), str(pause), str(work / "first")]


def launch_words(
    cluster: Cluster, options: Sequence[str], what: str, count: int, pause: float
) -> list[Word]:
    """Return the launch command for one rank on each node."""
    put_program(cluster)
    common: list[Word] = ["--nodes", cluster.node_list, "--experiments", experiments_of(cluster)]
    program = program_words(cluster, what, count, pause)
    return [*our("master_launch"), *common, "--nproc", "1", *options, *program]


def through_ssh(cluster: Cluster, commands: Sequence[str], copies: Sequence[Path]) -> None:
    """Run each node's command through its own ssh, all at once, each into its file."""
    script = "".join(
        f'ssh {address} {shlex.quote(command)} > {copy} & all="$all $!"\n'
        for address, command, copy in zip(cluster.addresses, commands, copies, strict=True)
    )
    run(cluster, ["bash", "-c", script + "for one in $all; do wait $one || exit 1; done"])


def experiments_of(cluster: Cluster) -> Path:
    return work_directory(cluster) / "experiments"


def local_logs(cluster: Cluster) -> list[Path]:
    found = experiments_of(cluster)
    return [one_file(found, f"*/logs/node_{i}_*.txt") for i in range(cluster.size)]


def one_file(directory: Path, pattern: str) -> Path:
    found = list(directory.glob(pattern))
    if len(found) != 1:
        raise Failed(f"{len(found)} files {pattern} in {directory}")
    return found[0]


def arrived(files: Sequence[Path], share: int, started: float) -> dict[str, float]:
    """Return the rate from `started` to the last write to any file, if they hold every line."""
    taken = max(path.stat().st_mtime for path in files) - started
    for path in files:
        check(path, share)
    size = len(lines.LINE) * share * len(files)
    return {"seconds": taken, "rate": size / taken}


def check(path: Path, share: int) -> None:
    """Check that every printed line arrived; torchrun may have added lines of its own."""
    line = lines.LINE.decode().rstrip("\n")
    count = first_line("grep", "--count", "--fixed-strings", "--line-regexp", line, str(path))
    if count != str(share):
        raise Failed(f"{path} has {count} of the {share} lines that were printed")


def same(files: Sequence[Path], others: Sequence[Path]) -> None:
    for path, other in zip(files, others, strict=True):
        if not filecmp.cmp(path, other, shallow=False):
            raise Failed(f"{path} and {other} are not the same")


# -- the delay of a line ------------------------------------------------------------------------


def delay_contenders() -> list[Contender]:
    return [
        Contender("ssh NODE python lines.py", delay_ssh),
        Contender("master_launch", delay_ours),
    ]


def delay_ssh(cluster: Cluster) -> Mapping[str, float]:
    put_program(cluster)
    program = program_words(cluster, "times", DELAY_LINES, DELAY_PAUSE)
    return delays(cluster, ["ssh", cluster.addresses[0], shlex.join([sys.executable, *program])])


def delay_ours(cluster: Cluster) -> Mapping[str, float]:
    shutil.rmtree(experiments_of(cluster), ignore_errors=True)
    return delays(cluster, launch_words(cluster, [], "times", DELAY_LINES, DELAY_PAUSE))


def delays(cluster: Cluster, words: Sequence[Word]) -> Mapping[str, float]:
    """Read the command's output; the age of a line follows from the time of day in it."""
    found, rest = [], b""
    with on_head(cluster, words, subprocess.PIPE) as process:
        assert process.stdout is not None
        with process.stdout:
            while data := os.read(process.stdout.fileno(), 1 << 16):
                now = time.time()
                *whole, rest = (rest + data).split(b"\n")
                last_words = (line.rpartition(b" ")[2] for line in whole)
                found += [now - float(word) for word in last_words if TIME.fullmatch(word)]
        process.wait()
    done_well(process)
    if len(found) != DELAY_LINES:
        raise Failed(f"{len(found)} of {DELAY_LINES} lines arrived")
    cuts = statistics.quantiles(found, n=100)
    return {"p50": cuts[49], "p99": cuts[98]}


# -- memory -------------------------------------------------------------------------------------


def peak_memory(megabytes: int) -> str:
    """Return the head's peak memory while it attaches to one log of this size."""
    progress(f"memory, {megabytes} MB")
    try:
        with fresh(1) as cluster:
            found = attach(["--quiet"], megabytes * LINES_PER_MEGABYTE, cluster)
        return f"{found['peak_kb'] / 1024:.0f} MiB"
    except Failed as failure:
        return f"failed: {failure}"


# -- the results --------------------------------------------------------------------------------


def rates(title: str, results: Mapping[int, Sequence[Contender]], megabytes: int) -> str:
    head = [f"{title} ({megabytes} MB)"]
    for nodes in results:
        head += [f"{nodes} node{'s' * (nodes > 1)}", "lines/s", "of ssh"]
    rows = []
    for index, one in enumerate(next(iter(results.values()))):
        row = [one.name]
        for group in results.values():
            row += rate_cells(group[index], group[0])
        rows.append(row)
    return table(head, rows)


def rate_cells(one: Contender, reference: Contender) -> list[str]:
    value, best = one.median("rate"), reference.median("rate")
    if value is None:
        return [one.missing, "", ""]
    of_best = f"{value / best:.2f}" if best else ""
    return [f"{value / 1e6:.0f} MB/s", f"{value / len(lines.LINE):,.0f}", of_best]


def delay_table(contenders: Sequence[Contender]) -> str:
    rows = []
    for one in contenders:
        p50, p99 = one.median("p50"), one.median("p99")
        if p50 is None or p99 is None:
            rows.append([one.name, one.missing, ""])
        else:
            rows.append([one.name, f"{p50 * 1e3:.1f} ms", f"{p99 * 1e3:.1f} ms"])
    title = f"From print to the command's output (a line every {DELAY_PAUSE * 1e3:.0f} ms)"
    return table([title, "p50", "p99"], rows)


def as_data(results: Mapping[int, Sequence[Contender]]) -> dict[str, Any]:
    return {
        str(nodes): {one.name: one.missing or one.samples for one in group}
        for nodes, group in results.items()
    }


if __name__ == "__main__":
    main()
