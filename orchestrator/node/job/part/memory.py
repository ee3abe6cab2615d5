"""Ends a rank before the machine, or its control group, runs out of memory.

The kernel's killer comes late: a machine swaps for minutes, one whose GPU shares its memory stands
still, and a control group kills any of its processes. So the supervisor looks at the free memory,
the more often the less there is, and ends the rank that grew while there is still some left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from orchestrator.common.text import format_bytes
from orchestrator.node.job import processes
from orchestrator.node.job.part.oom_evidence import SHM, control_groups, space_of
from orchestrator.node.job.processes import Process

GB = 10**9
# The least free memory by default, as a share of all and in bytes. A small machine keeps the last
# share: its jobs are to run in the rest.
SHARE, LEAST_BYTES, MOST_BYTES, MOST_SHARE = 0.02, GB, 4 * GB, 1 / 16
# Bytes a second: no program takes memory faster.
FASTEST = 16 * GB
# Seconds between two looks at the free memory, the shortest and the longest.
SHORTEST_SECONDS, LONGEST_SECONDS = 0.005, 1.0
# Seconds between two looks at all processes, and until the next if others take the memory.
SAMPLE_SECONDS, OTHERS_SECONDS = 5.0, 0.25
KEPT_SAMPLES = 5


class Pool(NamedTuple):
    """Memory with a limit: whose it is, its bytes, and those that are free."""

    of: str
    total: int
    free: int


class MemorySample(NamedTuple):
    """Bytes at one moment: of each rank with its children, of all other processes, in /dev/shm."""

    time: float
    ranks: Mapping[int, int]
    others: int
    shared: int


# A rank to end, its processes with the largest first, and why.
Runaway = tuple[int, list[Process], str]


class MemoryGuard:
    """Watches the free memory for one job."""

    def __init__(self, floor: float | None) -> None:
        # In GB; None for the default, and 0 for no guard.
        self.floor = floor
        self.groups = list(control_groups())
        # What was free when the job began: one that starts on a full machine is to run there.
        self.begun = {pool[:2]: pool.free for pool in self.pools()}
        self.due = 0.0
        # The first sample and the last ones.
        self.samples: list[MemorySample] = []

    def look(self, ranks: Mapping[int, int]) -> Runaway | None:
        """Return the rank to end, of these PIDs by rank, if there is too little memory."""
        now = time.monotonic()
        if now < self.due:
            return None
        rooms = ((pool.free - self.floor_of(pool), pool) for pool in self.pools() if ranks)
        room, pool = min(rooms, default=(FASTEST, None))
        self.due = now + min(max(room / FASTEST, SHORTEST_SECONDS), LONGEST_SECONDS)
        short = room <= 0 and self.floor != 0
        sampled = self.samples[-1].time if self.samples else -SAMPLE_SECONDS
        if pool is None or not (short or now - sampled > SAMPLE_SECONDS):
            return None
        found: Runaway | None = None
        try:
            # A look takes some time, in which a fast program would take the rest.
            signal_groups(ranks.values() if short else (), signal.SIGSTOP)
            running = processes.all_processes()
            self.sample(now, ranks, running)
            found = self.runaway(pool, ranks, running) if short else None
        finally:
            # After an error ranks must not stay stopped.
            others = (pid for rank, pid in ranks.items() if not found or rank != found[0])
            signal_groups(others if short else (), signal.SIGCONT)
        return found

    def pools(self) -> list[Pool]:
        return [*filter(None, (machine_pool(), *map(of_group, self.groups)))]

    def floor_of(self, pool: Pool) -> int:
        if self.floor is not None:
            return int(self.floor * GB)
        begun = self.begun.get(pool[:2], pool.total) / 4
        least = max(SHARE * pool.total, LEAST_BYTES)
        return int(min(least, MOST_BYTES, MOST_SHARE * pool.total, begun))

    def sample(self, now: float, ranks: Mapping[int, int], running: Mapping[int, Process]) -> None:
        sizes = {
            r: sum(one.memory for one in process_tree(running, pid)) for r, pid in ranks.items()
        }
        others = sum(process.memory for process in running.values()) - sum(sizes.values())
        self.samples.append(MemorySample(now, sizes, others, space_of(SHM)[0]))
        del self.samples[1:-KEPT_SAMPLES]

    def runaway(
        self, pool: Pool, ranks: Mapping[int, int], running: Mapping[int, Process]
    ) -> Runaway | None:
        """Return the rank that grew most, or None while other programs take the memory.

        Below half of the floor the job is ended all the same.
        """
        first, last, floor = self.samples[0], self.samples[-1], self.floor_of(pool)
        growth = {rank: last.ranks[rank] - first.ranks.get(rank, 0) for rank in ranks}
        shared, others = last.shared - first.shared, last.others - first.others
        beside = pool.of == MACHINE and others > max(0, sum(growth.values()) + shared)
        if beside and pool.free > floor / 2:
            self.due = last.time + OTHERS_SECONDS
            return None
        rank = max(ranks, key=lambda each: (growth[each], last.ranks[each]))
        own = sorted(process_tree(running, ranks[rank]), key=lambda one: one.memory, reverse=True)
        grown, who = growth[rank], "it"
        if shared > max(grown, pool.total // 16):
            who = f"files in {SHM} grew by {binary_size(shared)}, and the rank"
        elif grown < pool.total / 16:
            who = "no rank has grown much: the memory is pinned, or a GPU's; this rank"
        seen = ", ".join(binary_size(sample.ranks.get(rank, 0)) for sample in self.samples)
        if own and own[0].pid != ranks[rank]:
            seen += f"; process {own[0].pid} has the most, {binary_size(own[0].memory)}"
        why = (
            f"ended before memory ran out: {binary_size(pool.free)} of {binary_size(pool.total)} of"
            f" {pool.of} were free, and launch.memory_floor is {binary_size(floor)}; {who}"
            f" grew by {binary_size(grown)} in {last.time - first.time:.0f} s ({seen})"
        )
        return rank, own, why


def signal_groups(leaders: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to ranks and what they have started in their groups."""
    for pid in leaders:
        with contextlib.suppress(OSError):
            os.killpg(pid, number)


def process_tree(running: Mapping[int, Process], pid: int) -> list[Process]:
    """Return a process and its descendants, if it runs."""
    found = {pid, *processes.find_descendants(running, [pid])}
    return [running[one] for one in found if one in running]


def binary_size(count: int) -> str:
    return format_bytes(count, binary=True)


# -- what the kernel says -------------------------------------------------------------------------

MACHINE = "the machine"
SIZES = rb"(?m)^(MemTotal|MemAvailable):\s+(\d+) kB"


def machine_pool() -> Pool | None:
    """Return the memory of this machine, which includes that of a GPU that shares it."""
    sizes = dict(re.findall(SIZES, processes.file_contents("/proc/meminfo")))
    if len(sizes) < 2:
        return None
    return Pool(MACHINE, int(sizes[b"MemTotal"]) << 10, int(sizes[b"MemAvailable"]) << 10)


def of_group(group: tuple[str, str, bytes]) -> Pool | None:
    """Return the memory of a control group with a limit; the cache of files counts as free."""
    limit, use, prefix = group
    with contextlib.suppress(ValueError):
        total, used = int(processes.file_contents(limit)), int(processes.file_contents(use))
        stat = processes.file_contents(f"{os.path.dirname(limit)}/memory.stat")
        cached = re.findall(rb"^%s(?:in)?active_file (\d+)$" % prefix, stat, re.MULTILINE)
        # Without a limit, the old version of control groups has a number that is no memory's.
        if total < 1 << 50:
            return Pool("its control group", total, total - used + sum(map(int, cached)))
    return None
