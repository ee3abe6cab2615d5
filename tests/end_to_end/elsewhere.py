"""Runs a command of ours on a head that has nothing which Linux alone has; a test starts it."""

import builtins
import io
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

LINUX_ALONE = {
    select: ("epoll", "EPOLLIN", "EPOLLOUT", "EPOLLONESHOT"),
    os: (
        *("eventfd", "eventfd_read", "eventfd_write", "EFD_NONBLOCK", "EFD_CLOEXEC"),
        *("pidfd_open", "memfd_create", "sched_getaffinity", "sched_setaffinity"),
        *("posix_fadvise", "posix_fallocate", "copy_file_range", "splice", "O_TMPFILE", "O_PATH"),
    ),
    signal: ("pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT"),
    socket: ("SO_PEERCRED", "TCP_USER_TIMEOUT", "AF_NETLINK", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
}
HIDDEN = ("/proc", "/sys/")


def without_linux(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that finds nothing below /proc and /sys."""

    def look(*args: Any, **options: Any) -> Any:
        path = args[0] if args else "."
        named = isinstance(path, (str, bytes, os.PathLike))
        if named and os.fsdecode(path).startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(*args, **options)

    return look


def main() -> None:
    for module, names in LINUX_ALONE.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
        setattr(os, name, without_linux(getattr(os, name)))
    builtins.open = io.open = without_linux(builtins.open)  # type: ignore[assignment]
    sys.platform = "darwin"
    from orchestrator import entry

    getattr(entry, sys.argv.pop(1))()


if __name__ == "__main__":
    main()
