"""Evidence about a rank's end that its exit code does not show."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Container, Iterator
from typing import Any

from orchestrator.protocol.facts import FATAL_XIDS, XID

CGROUPS = "/sys/fs/cgroup"
SHM = "/dev/shm"
FULL_BYTES = 1 << 20  # with less left, the next tensor of a DataLoader does not fit
KERNEL_LOG = "/dev/kmsg"
NVIDIA = "/dev/nvidiactl"
OF_DRIVER = "NVRM: Xid"
JOURNAL_SECONDS = 1.0
FRESH_SECONDS = 5.0  # ranks fail together, and the journal is slow
MOST_LINES, LONGEST_LINE = 20, 400
KEPT_LINES = 500  # a driver may repeat itself a thousand times a second
# Of an exception that says so, the kernel's own line is among the last words before it.
GPU_ASSERTS = "device-side assert"
WORDS_CHARACTERS = 4000  # of a rank's last ones, before a dump of its stacks and of that dump


class Evidence:
    """Counters as they were when the job began, to compare with their present values."""

    def __init__(self) -> None:
        self.before = oom_kills()
        self.began = time.time()
        self.log: int | None = None  # of the kernel, from here on; None: not for this login
        if os.path.exists(NVIDIA):
            with contextlib.suppress(OSError):
                self.log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self.log, 0, os.SEEK_END)
        self.reported: list[str] = []  # by the driver
        self.asked = 0.0  # when the journal was
        self.told: set[str] = set()  # of which broken GPUs, and with which Xid

    def now(self) -> dict[str, Any]:
        kills = [count - self.before.get(name, 0) for name, count in oom_kills().items()]
        return {"oom_kills": max(kills, default=0), "shm_full": is_full(SHM)}

    def look(self) -> list[str]:
        """Return what the driver has reported since the last look; without a log of its own, none.

        The kernel's log can be waited for like a pipe.
        """
        if self.log is None:
            return []
        new = []
        try:
            new = [line[:LONGEST_LINE] for line in records(self.log) if XID.match(line)]
        except OSError:
            os.close(self.log)
            self.log = None
        self.reported = [*self.reported, *new][-KEPT_LINES:]
        return new

    def newly_broken(self, pids: Container[int]) -> list[str]:
        """Return a line for each GPU that is newly called broken, of these processes or of none."""
        lines = []
        for line in self.look():
            gpu = broken(line)
            if gpu and gpu not in self.told and is_about(line, pids):
                self.told.add(gpu)
                lines.append(line)
        return lines

    def of_driver(self, pid: int) -> tuple[str, ...]:
        """Return what the driver has reported since the job began, of this process or of none."""
        self.look()
        unheard = self.log is None and os.path.exists(NVIDIA)
        if unheard and time.monotonic() - self.asked > FRESH_SECONDS:
            self.reported = in_journal(self.began)
            self.asked = time.monotonic()
        ours = [line for line in self.reported if is_about(line, {pid})]
        return tuple(ours[-MOST_LINES:])


def is_about(line: str, pids: Container[int]) -> bool:
    """Return True if the driver speaks of one of these processes, or of none."""
    named = re.search(r"\bpid=(\d+)", line)
    return named is None or int(named[1]) in pids


def broken(line: str) -> str:
    """Return which GPU a line calls broken, and with which Xid; or nothing."""
    found = XID.match(line)
    return f"{found[1]} {found[2]}" if found and int(found[2]) in FATAL_XIDS else ""


def records(log: int) -> Iterator[str]:
    """Yield what the kernel has logged since the last look."""
    while True:
        try:
            yield os.read(log, 8192).decode("utf-8", "replace")
        except BrokenPipeError:  # some were overwritten, and it goes on after them
            continue
        except BlockingIOError:
            return


def in_journal(since: float) -> list[str]:
    """Return what the driver has reported since then, as far as systemd tells this login."""
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


def oom_kills() -> dict[str, int]:
    """Return file -> how many processes the kernel's out-of-memory killer ended, by its count.

    /proc/vmstat counts for the whole machine; where it does not (before Linux 4.13, or hidden from
    a container) the control group's own count is there.
    """
    files = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                files += [f"{CGROUPS}{path}/memory.events", f"{CGROUPS}/memory.events"]
    counts = {}
    for name in files:
        with contextlib.suppress(OSError), open(name, encoding="ascii") as file:
            counted = re.search(r"^oom_kill (\d+)$", file.read(), re.MULTILINE)
            if counted:
                counts[name] = int(counted.group(1))
    return counts


def is_full(path: str) -> bool:
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < FULL_BYTES


def last_words(output: bytes) -> str:
    """Return the last output before a dump of the stacks, and the dump's beginning."""
    text = output.decode("utf-8", "replace")
    start = text.rfind("Fatal Python error")
    if start < 0:
        return text[-WORDS_CHARACTERS:]
    return text[max(0, start - WORDS_CHARACTERS) : start + WORDS_CHARACTERS]
