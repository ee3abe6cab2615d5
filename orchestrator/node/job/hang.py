"""Measures whether a job still makes progress on this node, and collects its ranks' stacks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.node.job import job_processes, processes
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.events import RankEnded, RankStacks, RankStarted, Started
from orchestrator.protocol.requests.follow import has_ended
from orchestrator.protocol.timing import LATE_STACKS_SECONDS, STACKS_SECONDS, STACKS_SIGNAL

# The text of a collective whose time was over.
TIMED_OUT = re.compile(
    r"(?i)timed out (waiting|after)|(wait|socket) timeout|operation timeout|monitoredBarrier"
)
# The limit of the stacks, per rank.
LARGEST_BYTES = 1 << 20
# The limit of one recorder dump, in bytes.
LONGEST_DUMP = 1 << 23
# The number of collectives reported per group.
LAST = 50
TICKS = os.sysconf("SC_CLK_TCK")
# The fraction of a core above which a process works: a loop that only waits uses less.
BUSY = 0.05


class Activity:
    """Remembers when this run last showed progress."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.checked_at = self.printed = self.moved = time.monotonic()
        self.size = 0
        self.steps: dict[str, float] = {}
        self.ticks: dict[int, int] = {}

    def check(self) -> tuple[float, float]:
        """Return the seconds for which the job has been silent and idle.

        A program that reports its steps is judged by them: without a new step it is silent and
        idle. Any other is silent if it printed no line, and idle if it also used no processor time.
        """
        now = time.monotonic()
        if self._printed():
            self.printed = self.moved = now
        steps = step_times(self.run)
        pids = [] if steps else list(rank_pids(self.run)) or self.agents()
        ticks = {pid: ticks_of(pid) for pid in pids}
        used = sum(max(0, ticks[pid] - self.ticks.get(pid, 0)) for pid in ticks) / TICKS
        busy = used > BUSY * max(0.1, now - self.checked_at) if not steps else steps != self.steps
        if busy:
            self.moved = now
            if steps:
                self.printed = now
        self.steps, self.ticks, self.checked_at = steps, ticks, now
        return now - self.printed, now - self.moved

    def agents(self) -> list[int]:
        """Return torchrun's PIDs: before there are ranks, torchrun imports torch."""
        return [e.agent for e in self.run.read_events() if isinstance(e, Started)]

    def _printed(self) -> bool:
        try:
            size = os.stat(self.run.log).st_size
        except OSError:
            return False
        grew, self.size = size > self.size, size
        return grew


def step_times(run: RunDir) -> dict[str, float]:
    """Return the time of the last step of each rank that reports its steps."""
    return {
        entry.name: entry.stat().st_mtime
        for entry in os.scandir(run.path)
        if entry.name.startswith("step_")
    }


def rank_pids(run: RunDir) -> dict[int, int]:
    """Return rank by PID of the ranks that have started."""
    return {e.pid: e.rank for e in run.read_events() if isinstance(e, RankStarted)}


def ticks_of(pid: int) -> int:
    """Return the processor time of a process and of the children that it has waited for."""
    process = processes.find_process(pid)
    return process.ticks + process.waited if process is not None else 0


def collect_stacks(
    run: RunDir, patience: float = STACKS_SECONDS, most: int = LAST
) -> dict[int, RankStacks]:
    """Return every rank's stack and the collectives that torch recorded.

    Waits `patience` seconds at most: a rank that is stopped or stuck in the kernel never answers.
    A process that does not catch the signal, such as a shell script, would be killed by it, so it
    is not asked. For ranks without an answer, the state and the program are returned.
    """
    ours = {process.pid: process for process in job_processes.processes_of_job(run)}
    first = run.read_spec().first_rank
    found = {rank: pid for pid, rank in rank_pids(run).items() if pid in ours}
    asked = [rank for rank, pid in found.items() if processes.catches_signal(pid, STACKS_SIGNAL)]
    for rank in asked:
        stacks, dump, fifo = files_of(run, rank - first)
        with contextlib.suppress(OSError):
            os.truncate(stacks, 0)
            os.unlink(dump)
        processes.send_signal(ours[found[rank]], STACKS_SIGNAL)
        wake_rank(fifo)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not all(
        has_answered(run, rank - first) for rank in asked
    ):
        # A file written by another process cannot be waited for.
        time.sleep(0.05)
    answers = {}
    for rank, pid in found.items():
        stacks, dump, _ = files_of(run, rank - first)
        main = read_dump(stacks) if rank in asked else ""
        answers[rank] = RankStacks(
            state=ours[pid].state,
            stacks=main.replace("Stack", f"Current thread 0x{pid:016x}", 1),
            collectives=shorten_dumps(read_dump(dump, LONGEST_DUMP), most) if rank in asked else "",
            program="" if main else program_of(pid, list(ours.values())),
        )
    return answers


def waited_in_vain(failed: RankEnded) -> bool:
    """Return True if a rank failed as others did not come to a collective in time."""
    return bool(TIMED_OUT.search((failed.error.message if failed.error else "") + failed.said))


def late_ranks(run: RunDir) -> dict[int, RankStacks]:
    """Return the positions of the ranks that have not failed when another has waited in vain."""
    first = run.read_spec().first_rank
    ranks = collect_stacks(run, LATE_STACKS_SECONDS, 2).items()
    return {rank: where for rank, where in ranks if not os.path.exists(run.error(rank - first))}


def program_of(rank: int, ours: Sequence[Process]) -> str:
    """Return the program a rank waits for, the newest process below it, and its kernel function."""
    at = next(process for process in ours if process.pid == rank)
    while children := [process for process in ours if process.parent == at.pid]:
        at = max(children, key=lambda process: (process.started, process.pid))
    place = read_dump(f"/proc/{at.pid}/wchan").strip()
    return f"the program {at.name}" + (f", in the kernel's {place}()" if place.strip("0") else "")


def has_answered(run: RunDir, local: int) -> bool:
    stacks, dump, fifo = files_of(run, local)
    return bool(read_dump(stacks)) and (not os.path.exists(fifo) or os.path.exists(dump))


def files_of(run: RunDir, local: int) -> tuple[str, str, str]:
    """Return the paths of a rank's stack, its collectives, and the FIFO that requests these."""
    names = (f"stacks_{local}", f"collectives_{local}.json", f"ask_{local}")
    stacks, dump, fifo = (os.path.join(run.path, name) for name in names)
    return stacks, dump, fifo


def shorten_dumps(dumps: str, most: int = LAST) -> str:
    """Return the last collectives of each group, and the first that has not ended, as JSON."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for dump in dumps.splitlines():
        # A torch of another version may write its dump differently.
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            for entry in json.loads(dump)["entries"]:
                backend = str(entry.get("profiling_name")).partition(":")[0]
                of = str((entry.get("process_group"), backend, entry.get("is_p2p")))
                groups.setdefault(of, []).append(entry)
    kept = []
    for entries in groups.values():
        ended = [at for at, entry in enumerate(entries) if has_ended(entry)]
        after = ended[-1] + 1 if ended else 0
        kept += [*entries[after : min(after + 1, len(entries) - most)], *entries[-most:]]
    return json.dumps({"entries": kept}) if kept else ""


def wake_rank(fifo: str) -> None:
    """Wake the rank's thread that dumps its collectives."""
    # No process reads the FIFO, or it is full.
    with (
        contextlib.suppress(OSError),
        os.fdopen(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as file,
    ):
        file.write(b"?")


def read_dump(path: str, most: int = LARGEST_BYTES) -> str:
    return processes.file_contents(path, most).decode("utf-8", "replace")
