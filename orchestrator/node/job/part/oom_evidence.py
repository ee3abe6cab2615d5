"""Evidence about a rank's end that its exit code does not show."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Container, Iterator
from typing import Any

from orchestrator.node.job import processes
from orchestrator.protocol.facts import FATAL_XIDS, XID

CGROUPS = "/sys/fs/cgroup"
SHM = "/dev/shm"
# With less space left, the next tensor of a DataLoader does not fit.
FULL_BYTES = 1 << 20
KERNEL_LOG = "/dev/kmsg"
NVIDIA = "/dev/nvidiactl"
OF_DRIVER = "NVRM: Xid"
JOURNAL_SECONDS = 1.0
# Ranks fail together, and the journal is slow, so it is read at most this often.
FRESH_SECONDS = 5.0
MOST_LINES, LONGEST_LINE = 20, 400
# A driver may repeat a message a thousand times a second.
KEPT_LINES = 500
# For an exception with these words, the kernel's own message is in the output before it.
GPU_ASSERTS = "device-side assert"
# The limit of a rank's last output before a dump of its stacks, and of the dump.
WORDS_CHARACTERS = 4000


class Evidence:
    """Counters as they were when the job began, to compare with their present values."""

    def __init__(self) -> None:
        self.before = oom_kills()
        self.began = time.time()
        # The kernel's log, read from its present end on; None if this login may not read it.
        self.log: int | None = None
        if os.path.exists(NVIDIA):
            with contextlib.suppress(OSError):
                self.log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self.log, 0, os.SEEK_END)
        # Lines that the driver has logged.
        self.reported: list[str] = []
        # The time of the last read of the journal.
        self.asked = 0.0
        # GPUs already reported as broken, each with its Xid.
        self.told: set[str] = set()

    def now(self) -> dict[str, Any]:
        return {
            "oom_kills": max(
                (count - self.before.get(name, 0) for name, count in oom_kills().items()), default=0
            ),
            "shm_full": is_full(SHM),
        }

    def look(self) -> list[str]:
        """Return the driver's messages since the last look; none if the kernel's log is unreadable.

        The kernel's log can be polled like a pipe.
        """
        if self.log is None:
            return []
        new = []
        try:
            new = [line[:LONGEST_LINE] for line in kernel_messages(self.log) if XID.match(line)]
        except OSError:
            os.close(self.log)
            self.log = None
        self.reported = [*self.reported, *new][-KEPT_LINES:]
        return new

    def newly_broken(self, pids: Container[int]) -> list[str]:
        """Return a line for each GPU newly reported as broken that names these or none."""
        lines = []
        for line in self.look():
            gpu = broken_gpu(line)
            if gpu and gpu not in self.told and is_about(line, pids):
                self.told.add(gpu)
                lines.append(line)
        return lines

    def of_driver(self, pid: int) -> tuple[str, ...]:
        """Return the driver's messages since the job began that name this process or none."""
        self.look()
        unheard = self.log is None and os.path.exists(NVIDIA)
        if unheard and time.monotonic() - self.asked > FRESH_SECONDS:
            self.reported = in_journal(self.began)
            self.asked = time.monotonic()
        return tuple([line for line in self.reported if is_about(line, {pid})][-MOST_LINES:])


def is_about(line: str, pids: Container[int]) -> bool:
    """Return True if the driver names one of these processes, or none."""
    named = re.search(r"\bpid=(\d+)", line)
    return named is None or int(named[1]) in pids


def broken_gpu(line: str) -> str:
    """Return the GPU that a line reports as broken and the Xid, or an empty string."""
    found = XID.match(line)
    return f"{found[1]} {found[2]}" if found and int(found[2]) in FATAL_XIDS else ""


def kernel_messages(log: int) -> Iterator[str]:
    """Yield the kernel's messages since the last look."""
    while True:
        try:
            yield os.read(log, 8192).decode("utf-8", "replace")
        # Some messages were overwritten; the next read continues after them.
        except BrokenPipeError:
            continue
        except BlockingIOError:
            return


def in_journal(since: float) -> list[str]:
    """Return the driver's messages since a time, if this login may read the journal."""
    # Most jobs do not need this import.
    import subprocess

    words = ["journalctl", "-k", "-q", "--no-pager", "-o", "short", f"--lines={KEPT_LINES}"]
    try:
        done = subprocess.run(
            [*words, f"--since=@{since:.0f}", f"--grep={OF_DRIVER}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=JOURNAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return [line[:LONGEST_LINE] for line in lines if XID.match(line)]


def control_groups() -> Iterator[tuple[str, str, bytes]]:
    """Yield the files with the limit and the use of each group above this process, and a prefix.

    The prefix is that of the counters of the whole group in memory.stat of the old version.
    """
    for line in processes.file_contents("/proc/self/cgroup").decode().splitlines():
        _, controllers, path = line.split(":", 2)
        top, names, prefix = CGROUPS, ("memory.max", "memory.current"), b""
        if "memory" in controllers.split(","):
            top, prefix = f"{CGROUPS}/memory", b"total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif controllers:
            continue
        parts = path.strip("/").split("/")
        # In a container, the path may be that on its host, and the top the container's own.
        for count in range(len(parts), -1, -1):
            limit, use = ("/".join([top, *parts[:count], name]) for name in names)
            if os.path.isdir(os.path.dirname(limit)):
                yield limit, use, prefix


def oom_kills() -> dict[str, int]:
    """Return the out-of-memory killer's count of killed processes by file.

    /proc/vmstat counts for the whole machine. If it does not (before Linux 4.13, or hidden from a
    container), the control group has a count of its own.
    """
    groups = (os.path.dirname(limit) for limit, _, prefix in control_groups() if not prefix)
    texts = {
        name: processes.file_contents(name)
        for name in ("/proc/vmstat", *(f"{group}/memory.events" for group in groups))
    }
    found = {n: re.search(rb"^oom_kill (\d+)$", texts[n], re.MULTILINE) for n in texts}
    return {name: int(count[1]) for name, count in found.items() if count}


def space_of(path: str) -> tuple[int, int]:
    """Return the used and the free bytes of a file system, or zeros if it cannot be read."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return 0, 0
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_bavail * disk.f_frsize


def is_full(path: str) -> bool:
    used, free = space_of(path)
    return used > 0 and free < FULL_BYTES


def last_words(output: bytes) -> str:
    """Return the last output before a dump of the stacks, and the dump's beginning."""
    text = output.decode("utf-8", "replace")
    start = text.rfind("Fatal Python error")
    if start < 0:
        return text[-WORDS_CHARACTERS:]
    return text[max(0, start - WORDS_CHARACTERS) : start + WORDS_CHARACTERS]
