"""Finds processes of this machine, signals exactly those, and waits until they are gone.

A PID alone is never trusted: every signal goes through a pidfd whose start time was checked, so a
reused PID cannot be hit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from orchestrator.common import files

# The errors for which a job's files cannot be written here and another directory can be chosen.
# Some network disks have no sockets and named pipes.
NO_PLACE = {
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTSUP, errno.ENOSYS),
}
ELSEWHERE = "ORCHESTRATOR_HOME, set in its .bashrc, names another place"

# The options of the Python that runs a supervisor.
OPTIONS = ("-IS", "-Xutf8")
# The polling interval where no pidfd is available.
LOOK_SECONDS = 0.02
# The limit of directory listings in one look.
MOST_LISTS = 50
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
# The limit of looks in a row while the processes found are gone before a pidfd is open.
MOST_LOOKS = 10


# Defined in linux/sched.h.
PF_EXITING = 0x4


class Process(NamedTuple):
    pid: int
    # In clock ticks since boot. Together with the PID it identifies one process forever.
    started: int
    parent: int
    state: str
    name: str
    # The processor time of the process.
    ticks: int = 0
    # The processor time of the children that it has waited for.
    waited: int = 0
    # The bytes of resident memory.
    memory: int = 0
    # The flags of its first thread.
    flags: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.started

    @property
    def is_dead(self) -> bool:
        return self.state in "ZX"


EMPTY: Mapping[int, Process] = {}


def find_process(pid: int) -> Process | None:
    """Return the process that has a PID now, or None."""
    text = file_contents(f"/proc/{pid}/stat").decode("utf-8", "replace")
    if not text:
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself.
    name, fields = (
        text[text.index("(") + 1 : text.rindex(")")],
        text[text.rindex(")") + 2 :].split(),
    )
    state = fields[0]
    if state == "Z" and int(fields[17]) > 1:
        # The first thread has ended; the others still hold the files.
        state = "S"
    own, waited = (int(fields[at]) + int(fields[at + 1]) for at in (11, 13))
    memory, flags = int(fields[21]) * PAGE, int(fields[6])
    return Process(pid, int(fields[19]), int(fields[1]), state, name, own, waited, memory, flags)


def own_limits() -> list[tuple[int, int, int]]:
    """Return each limit of this process as (kind, soft, hard)."""
    kinds = sorted({v for n, v in vars(resource).items() if n.startswith("RLIMIT_")})
    return [(kind, *resource.getrlimit(kind)) for kind in kinds]


def start_time(process: Process) -> float:
    """Return the start time of a process, in Unix seconds."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + process.started / TICKS


def catches_signal(pid: int, signum: int) -> bool:
    """Return True if a process has a handler of its own for a signal."""
    caught = re.search(rb"^SigCgt:\s*(\w+)", file_contents(f"/proc/{pid}/status"), re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (signum - 1) & 1)


def all_processes(
    examine: Callable[[Process], bool] = lambda _: True, before: Mapping[int, Process] = EMPTY
) -> dict[int, Process]:
    """Return all processes; those of an earlier look are not read again.

    `examine` is called at once for each living process, and returns True if it could read it. If
    one has ended before it was read, it may have left a child that no list had. Then another list
    follows, so that processes that fork all the time are not missed.
    """
    running = dict(before)
    for _ in range(MOST_LISTS):
        listed = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        missed = False
        # The newest come first, as they may end soon.
        for pid in reversed(listed):
            if pid in running:
                continue
            process = find_process(pid)
            if process is not None:
                running[pid] = process
            if (
                process is None
                or process.is_dead
                or (not examine(process) and not is_alive(process))
            ):
                missed = True
        if not missed:
            break
    return running


def environment_of(pid: int) -> set[bytes]:
    """Return the environment a process was started with; empty if it cannot be read."""
    text = file_contents(f"/proc/{pid}/environ")
    # The first thread may have ended before the others.
    if not text:
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{pid}/task")
            texts = (file_contents(f"/proc/{pid}/task/{thread}/environ") for thread in threads)
            text = next(filter(None, texts), b"")
    return set(text.split(b"\0")) - {b""}


def file_contents(path: str, most: int = -1) -> bytes:
    """Return the first `most` bytes of a file, or all; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""


class ProcessSet:
    """A set of processes, each held from the first look until it and its resources are gone.

    A dying process loses its environment before it closes its files and ports. Its pidfd becomes
    readable when all of that is done.
    """

    def __init__(self, processes: Iterable[Process] = ()) -> None:
        # Each process with its pidfd.
        self.seen: dict[tuple[int, int], tuple[Process, int | None]] = {}
        self.add(processes)

    def find(self) -> Iterable[Process]:
        """Return the processes that belong to the set now, beside those that were added."""
        return ()

    def living(self) -> list[Process]:
        """Look again; return the processes that are not gone yet.

        A process that was alive a moment ago and is gone may have started another one. So the look
        is repeated until no process has ended during it.
        """
        passed: list[Process] = []
        for _ in range(MOST_LOOKS):
            found = list(self.find())
            self.add(found)
            for key, (process, pidfd) in list(self.seen.items()):
                if is_gone(process, pidfd):
                    self.forget(key)
            passed = [process for process in found if process.key not in self.seen]
            if not passed:
                break
        return [process for process, _ in self.seen.values()] or passed

    def add(self, processes: Iterable[Process]) -> None:
        for process in processes:
            if process.key not in self.seen:
                self.seen[process.key] = (process, open_pidfd(process))

    def wait(self, seconds: float) -> bool:
        """Wait until none is left, at most so long; return True if none is."""
        deadline = time.monotonic() + seconds
        while self.living():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            for _, pidfd in self.seen.values():
                if pidfd is None:
                    left = min(left, LOOK_SECONDS)
                else:
                    poll.register(pidfd, select.POLLIN)
            poll.poll(left * 1000)
        return True

    def forget(self, key: tuple[int, int]) -> None:
        pidfd = self.seen.pop(key)[1]
        if pidfd is not None:
            os.close(pidfd)

    def close(self) -> None:
        for key in list(self.seen):
            self.forget(key)


def command_line_of(pid: int) -> list[str]:
    """Return the command line of a process.

    A standby process (node/warm) has unused space at the end, which is removed.
    """
    words = file_contents(f"/proc/{pid}/cmdline").rstrip(b"\0").split(b"\0")
    return [os.fsdecode(word) for word in words]


def open_pidfd(process: Process) -> int | None:
    """Open a pidfd of exactly this process; return None if that is impossible."""
    try:
        pidfd = os.pidfd_open(process.pid)
    # The process is gone, the kernel is older than 5.3, or too many files are open.
    except (OSError, AttributeError):
        return None
    if process_again(process) is not None:
        return pidfd
    os.close(pidfd)
    return None


def is_gone(process: Process, pidfd: int | None) -> bool:
    """Return True if a process has ended and its files and ports are closed."""
    if pidfd is None:
        return not is_alive(process)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def wait_for_end(wanted: Iterable[Process], seconds: float) -> None:
    """Wait until these processes have ended, at most so long."""
    with contextlib.closing(ProcessSet(wanted)) as held:
        held.wait(seconds)


def owner_of(pid: int) -> int:
    """Return the user of a process, or -1 if it has ended."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def find_descendants(processes: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    descendants: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in descendants:
                descendants.add(child)
                queue.append(child)
    return descendants


def send_signal(process: Process, signum: int) -> bool:
    """Signal exactly this process; return False if it is gone or may not be signalled."""
    pidfd = open_pidfd(process)
    try:
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signum)
        elif process_again(process) is None:
            return False
        # Without a pidfd (a kernel before 5.3, no free descriptor) the check and the signal are
        # separate.
        else:
            os.kill(process.pid, signum)
    except OSError:
        return False
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return True


def process_again(process: Process) -> Process | None:
    """Return the process as it is now, or None if it is gone."""
    now = find_process(process.pid)
    return now if now is not None and now.key == process.key else None


def is_alive(process: Process) -> bool:
    now = process_again(process)
    return now is not None and not now.is_dead


def is_leaving(process: Process) -> bool:
    """Return True if it has ended or is ending: its sockets close before it is seen dead."""
    now = process_again(process)
    return now is None or now.is_dead or bool(now.flags & PF_EXITING)


def peer_user(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", data)[1])


def error_in_words(error: BaseException) -> str:
    """Return a system error as text: which limit of the login, or which file and why."""
    no_process = none_left(error)
    if no_process or not isinstance(error, OSError) or not error.strerror:
        return no_process or str(error)
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"its login may have {limit} open files (`ulimit -n`), which is too few"
    if error.errno == errno.EFBIG:
        return "its login may not write a file as large as that (`ulimit -f`)"
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    what = f"{path}: {files.reason_of_error(error)}" if path else files.reason_of_error(error)
    ours = error.errno in NO_PLACE and path.startswith(os.path.join(files.our_directory(), ""))
    return f"{what}; {ELSEWHERE}" if ours else what


def none_left(error: BaseException) -> str:
    """Return an explanation if no process or thread could be started, else an empty string."""
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    if not no_thread and not isinstance(error, BlockingIOError):
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    allowed = "any number" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        f"no further process or thread can be started there: its login may have {allowed}"
        " (`ulimit -u`), its container maybe fewer; end some of them, or raise the limit"
    )
