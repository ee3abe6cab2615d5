"""Measures whether a job still makes progress on this node, and asks its ranks where they are."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.node.job import job_processes, processes
from orchestrator.node.job.processes import Process, descendants
from orchestrator.node.job.run_directory import RunDir, all_runs
from orchestrator.protocol.events import RankStarted, Started
from orchestrator.protocol.requests.follow import RankStacks, has_ended
from orchestrator.protocol.timing import STACKS_SIGNAL

PATIENCE_SECONDS = 3.0  # for all ranks of a node to write down where they are
SEEN_IN_SECONDS = 3.0  # in which py-spy has to tell it of the others
LARGEST_CHARACTERS = 1 << 20  # of stacks and of collectives, per rank
LONGEST_DUMP = 1 << 23  # characters of what its recorders hold
LAST = 50  # collectives of a group that are told of
TICKS = os.sysconf("SC_CLK_TCK")
BUSY = 0.05  # of a core: less is a loop that only waits


class Activity:
    """Remembers when this run last showed progress."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.checked_at = self.printed = self.moved = time.monotonic()
        self.size = 0
        self.steps: dict[str, float] = {}
        self.ticks: dict[int, int] = {}

    def check(self) -> tuple[float, float]:
        """Return for how many seconds it has been silent and idle.

        A program that reports its steps is judged by them: it is silent and idle without one. Any
        other is silent if no line was printed, and idle if it used no processor time either.
        """
        now = time.monotonic()
        if self._printed():
            self.printed = self.moved = now
        steps = step_times(self.run)
        pids = [] if steps else list(rank_pids(self.run)) or agent_pids(self.run)
        ticks = {pid: ticks_of(pid) for pid in pids}
        used = sum(max(0, ticks[pid] - self.ticks.get(pid, 0)) for pid in ticks) / TICKS
        busy = used > BUSY * max(0.1, now - self.checked_at) if not steps else steps != self.steps
        if busy:
            self.moved = now
            if steps:
                self.printed = now
        self.steps, self.ticks, self.checked_at = steps, ticks, now
        return now - self.printed, now - self.moved

    def _printed(self) -> bool:
        try:
            size = os.stat(self.run.log).st_size
        except OSError:
            return False
        grew, self.size = size > self.size, size
        return grew


def step_times(run: RunDir) -> dict[str, float]:
    """Return when each rank that reports its steps made the last one."""
    times = {}
    for entry in os.scandir(run.path):
        if entry.name.startswith("step_"):
            times[entry.name] = entry.stat().st_mtime
    return times


def rank_pids(run: RunDir) -> dict[int, int]:
    """Return PID -> rank of those that have started."""
    return {e.pid: e.rank for e in run.read_events() if isinstance(e, RankStarted)}


def agent_pids(run: RunDir) -> list[int]:
    """Return torchrun itself: until there are ranks, it is what imports torch."""
    return [e.agent for e in run.read_events() if isinstance(e, Started)]


def ticks_of(pid: int) -> int:
    """Return the processor time of a process and of its children that it has waited for."""
    process = processes.find(pid)
    return process.ticks + process.waited if process is not None else 0


def of_process(pid: int) -> RankStacks:
    """Ask one process: a rank of a job of this login as `collect` does, another through py-spy."""
    for run in job_processes.here(all_runs()):
        if (rank := rank_pids(run).get(pid)) is not None and (found := collect(run, pid)):
            return found[rank]
    process = processes.find(pid)
    if process is None:
        return RankStacks(state="", stacks="", collectives="", program="it has ended")
    py_spy = py_spy_of(sys.executable) if is_python(pid) else None
    stacks = py_spy_stacks(py_spy, [process], SEEN_IN_SECONDS).get(pid, "") if py_spy else ""
    program = program_of(pid, [process])
    return RankStacks(
        state=process.state,
        stacks=stacks[:LARGEST_CHARACTERS],
        collectives="",
        program=program,
    )


def collect(run: RunDir, only: int | None = None) -> dict[int, RankStacks]:
    """Ask every rank, or the one with this PID, for its stacks and the collectives it remembers.

    Waits for none longer than a moment: one that is stopped, or stuck in the kernel, says nothing.
    One that does not catch the signal, such as a shell script, would be killed by it: it is not
    asked. Of those that say nothing, its state is known, and what py-spy sees where there is one.
    """
    ours = {process.pid: process for process in job_processes.of_job(run.job, run.node)}
    first = run.read_spec().first_rank
    asked: dict[int, tuple[int, int, int]] = {}  # rank -> PID, local rank, size of its stacks
    awaited = []
    for pid, rank in rank_pids(run).items():
        if pid in ours and only in (None, pid):
            local = rank - first
            who = asked[rank] = (pid, local, size_of(file_of(run, "stacks", local)))
            if processes.catches(pid, STACKS_SIGNAL):
                for earlier in (file_of(run, "threads", local), collectives(run, local)):
                    with contextlib.suppress(OSError):
                        os.unlink(earlier)
                processes.send(ours[pid], STACKS_SIGNAL)
                knock(file_of(run, "ask", local))
                awaited.append(who)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and not all(answered(run, *who) for who in awaited):
        time.sleep(0.05)  # a file that another process writes rings no bell
    main = {
        rank: read(file_of(run, "stacks", local), size) for rank, (_, local, size) in asked.items()
    }
    answers = {
        rank: RankStacks(
            state=ours[pid].state,
            stacks=all_stacks(run, pid, local, main[rank]),
            collectives=shortened(read(collectives(run, local), 0, LONGEST_DUMP)),
        )
        for rank, (pid, local, _) in asked.items()
    }
    silent = {rank: asked[rank][0] for rank, stack in main.items() if not stack}
    for rank, text in seen(run, silent, list(ours.values())).items():
        answers[rank] = answers[rank].replace(stacks=text[:LARGEST_CHARACTERS])
    for rank, pid in silent.items():
        if not answers[rank].stacks:
            answers[rank] = answers[rank].replace(program=program_of(pid, list(ours.values())))
    return answers


def program_of(rank: int, ours: Sequence[Process]) -> str:
    """Name the program that a rank waits for, the newest below it, and its place in the kernel."""
    at = next(process for process in ours if process.pid == rank)
    while children := [process for process in ours if process.parent == at.pid]:
        at = max(children, key=lambda process: (process.started, process.pid))
    place = read(f"/proc/{at.pid}/wchan", 0).strip()
    return f"the program {at.name}" + (f", in the kernel's {place}()" if place.strip("0") else "")


def seen(run: RunDir, silent: dict[int, int], ours: list[Process]) -> dict[int, str]:
    """Return what py-spy sees of the Pythons of ranks that say nothing: rank -> PID."""
    asked = py_spy_of(run.read_spec().agent[0]) if silent else None
    if asked is None:
        return {}
    of_rank = {rank: pythons(pid, ours) for rank, pid in silent.items()}
    found = py_spy_stacks(
        asked, [one for some in of_rank.values() for one in some], SEEN_IN_SECONDS
    )
    # The oldest comes last, as the main thread does: it is the program, others work for it.
    return {
        rank: "\n".join(found[one.pid] for one in reversed(some) if one.pid in found)
        for rank, some in of_rank.items()
    }


def answered(run: RunDir, pid: int, local: int, before: int) -> bool:
    wrote = size_of(file_of(run, "stacks", local)) > before
    remembers = os.path.exists(file_of(run, "ask", local))
    return wrote and (not remembers or os.path.exists(collectives(run, local)))


def file_of(run: RunDir, what: str, local: int) -> str:
    """Return where a rank writes its "stacks" or "threads", or is asked for them ("ask")."""
    return os.path.join(run.path, f"{what}_{local}")


def all_stacks(run: RunDir, pid: int, local: int, main: str) -> str:
    """Return the stacks of a rank's threads; that of the main one is last, headed as the others."""
    headed = main.replace("Stack", f"Current thread 0x{pid:016x}", 1)
    return (read(file_of(run, "threads", local), 0) + headed)[-LARGEST_CHARACTERS:]


def collectives(run: RunDir, local: int) -> str:
    return os.path.join(run.path, f"collectives_{local}.json")


def entries_of(dumps: str) -> list[dict[str, Any]]:
    """Return the collectives that a rank's recorders hold: each dump is a line of JSON."""
    entries: list[dict[str, Any]] = []
    for dump in dumps.splitlines():
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            entries += json.loads(dump)["entries"]  # else of a torch that writes it differently
    return entries


def shortened(dumps: str) -> str:
    """Return the last collectives of each group, and the first that has not ended, as JSON."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries_of(dumps):
        backend = str(entry.get("profiling_name")).partition(":")[0]
        of = str((entry.get("process_group"), backend, entry.get("is_p2p")))
        groups.setdefault(of, []).append(entry)
    kept = []
    for entries in groups.values():
        ended = [at for at, entry in enumerate(entries) if has_ended(entry)]
        after = ended[-1] + 1 if ended else 0
        kept += [*entries[after : min(after + 1, len(entries) - LAST)], *entries[-LAST:]]
    return json.dumps({"entries": kept}) if kept else ""


def knock(fifo: str) -> None:
    """Wake the rank's thread that dumps its collectives."""
    with contextlib.suppress(OSError):  # no process reads there, or the pipe is full
        fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, b"?")
        finally:
            os.close(fd)


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def read(path: str, start: int, most: int = LARGEST_CHARACTERS) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(start)
            return file.read(most)
    except OSError:
        return ""


PY_SPY = "py-spy"
MOST_PYTHONS = 4  # Pythons of one rank, the oldest first


def py_spy_of(python: str) -> str | None:
    """Return py-spy of the job's environment, or else the one on the path."""
    return shutil.which(PY_SPY, path=os.path.dirname(python)) or shutil.which(PY_SPY)


def pythons(rank: int, ours: Sequence[Process]) -> list[Process]:
    """Return the process of a rank and those below it, as far as they are Pythons."""
    below = descendants({process.pid: process for process in ours}, [rank])
    found = [one for one in ours if one.pid in {rank, *below} and is_python(one.pid)]
    return sorted(found, key=lambda process: process.started)[:MOST_PYTHONS]


def is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def py_spy_stacks(asked: str, wanted: Sequence[Process], seconds: float) -> dict[int, str]:
    """Return the stacks of these processes that py-spy can tell within so many seconds."""
    running = {
        process: subprocess.Popen(
            [asked, "dump", "--nonblocking", "--json", "--pid", str(process.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for process in wanted
    }
    deadline = time.monotonic() + seconds
    found = {}
    for process, dump in running.items():
        try:
            said, _ = dump.communicate(timeout=max(0.0, deadline - time.monotonic()))
            found[process.pid] = "".join(lines_of_threads(process, json.loads(said)))
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            dump.kill()
            dump.communicate()
    return found


def lines_of_threads(process: Process, threads: list[dict[str, Any]]) -> Iterator[str]:
    """Write py_spy_stacks as faulthandler does, the main thread last."""
    yield f"Process {process.pid} ({process.name}), as {PY_SPY} sees it:\n"
    for thread in sorted(threads, key=lambda thread: thread["os_thread_id"] == process.pid):
        yield f"Thread 0x{int(thread['thread_id']):016x} (most recent call first):\n"
        for frame in thread["frames"]:
            yield f'  File "{frame["filename"]}", line {int(frame["line"])} in {frame["name"]}\n'
