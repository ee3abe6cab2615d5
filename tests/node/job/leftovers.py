"""A rank that leaves something behind: leftovers.py KIND MARK.

Each leftover has MARK in its command line, and ends by itself once the file MARK is gone.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIVES = "while [ -e {0} ]; do sleep 0.2; done; exit # {0}"
BARE = {"PATH": "/usr/bin:/bin"}


def main(kind: str, mark: str) -> None:
    KINDS[kind](LIVES.format(mark))
    print("ready", flush=True)
    time.sleep(300)


def shell(lives: str, *before: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*before, "/bin/sh", "-c", lives], env=env)


def daemon(then: Callable[[], Any]) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            then()
        os._exit(0)


def apart(lives: str) -> None:
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, 4096)
    os.chdir("/")
    os.execve("/bin/sh", ["sh", "-c", lives], BARE)


def overwritten(lives: str) -> None:
    """Overwrite the environment block, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    if os.fork() == 0:
        os.setsid()
        ctypes.memset(begin, 0, end - begin)
        shell(lives, env={})
        time.sleep(1000)


KINDS: dict[str, Callable[[str], Any]] = {
    "many": lambda lives: [shell(lives) for _ in range(30)],
    "daemon_with_tag": lambda lives: daemon(lambda: shell(lives)),
    "daemon_without": lambda lives: daemon(lambda: apart(lives)),
    "stopped": lambda lives: os.kill(shell(lives, env=BARE).pid, signal.SIGSTOP),
    "namespace": lambda lives: shell(lives, "unshare", "-p", "-f", "--mount-proc", env=BARE),
    "overwritten": overwritten,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
