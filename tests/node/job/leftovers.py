"""A rank that leaves something behind: leftovers.py KIND MARK.

What it leaves has MARK in its command line, and goes by itself once the file MARK is not there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIVES = "while [ -e {0} ]; do sleep 0.2; done; exit # {0}"
STORM_SECONDS = 120  # whoever takes the mark away may have been killed
MOST_TASKS = 6_000  # of the machine: what nobody waits for stays in its table of processes
# Each generation forks the next one and ends.
HOPS = f"""
import os, sys, time
os.closerange(3, 4096)
ends = time.monotonic() + {STORM_SECONDS}
while os.path.exists(sys.argv[1]) and time.monotonic() < ends:
    time.sleep(float(sys.argv[2]))
    with open("/proc/loadavg") as file:
        if int(file.read().split()[3].partition("/")[2]) > {MOST_TASKS}:
            time.sleep(0.2)
            continue
    if os.fork():
        os._exit(0)
    if len(sys.argv) > 3:
        os.setsid()
"""
SPAWNS = """
import os, sys, time
os.posix_spawn("/bin/sh", ["sh", "-c", sys.argv[1]], {})
while os.path.exists(sys.argv[2]):
    time.sleep(0.2)
"""
BARE = {"PATH": "/usr/bin:/bin"}
LIBC = ctypes.CDLL(None, use_errno=True)


def main(kind: str, mark: str) -> None:
    lives = LIVES.format(mark)
    KINDS[kind](lives, mark)
    print("ready", kind, flush=True)
    if kind == "ends_at_once":
        time.sleep(0.3)
    elif kind == "ends_before":
        daemon(lambda: apart(lives))
        time.sleep(0.2)
    else:
        time.sleep(300)


def child(lives: str, *before: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*before, "/bin/sh", "-c", lives], env=BARE)


def daemon(then: Callable[[], Any]) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            then()
        os._exit(0)


def become(lives: str) -> None:
    os.execve("/bin/sh", ["sh", "-c", lives], BARE)


def apart(lives: str) -> None:
    os.closerange(0, 4096)
    os.chdir("/")
    become(lives)


def python(program: str, *words: str, env: dict[str, str] | None = None) -> None:
    environment = dict(os.environ) if env is None else env
    os.execve(sys.executable, [sys.executable, "-IS", "-c", program, *words], environment)


def other_user(lives: str) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    apart(lives)


def stopped(lives: str, _: str) -> None:
    os.kill(child(lives).pid, signal.SIGSTOP)


def deaf(lives: str, _: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    child(lives)


def deaf_to_all(lives: str) -> None:
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    become(lives)


def traced(lives: str, _: str) -> None:
    pid = os.fork()
    if pid == 0:
        LIBC.ptrace(0, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        become(lives)
    os.waitpid(pid, os.WUNTRACED)


def first_thread_ended(lives: str, _: str) -> None:
    def other() -> None:
        child(lives)
        time.sleep(1000)

    if os.fork() == 0:
        threading.Thread(target=other, daemon=False).start()
        time.sleep(0.05)
        LIBC.pthread_exit(None)


def holds_a_port(lives: str, _: str) -> None:
    held = socket.create_server(("", 0))
    os.set_inheritable(held.fileno(), True)
    daemon(lambda: become(lives))
    held.detach()


def overwritten(lives: str, _: str) -> None:
    """Overwrite the environment block, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    if os.fork() == 0:
        os.setsid()
        ctypes.memset(begin, 0, end - begin)
        subprocess.Popen(["/bin/sh", "-c", lives], env={})
        time.sleep(1000)


def forks_shells(mark: str) -> None:
    os.closerange(0, 4096)
    turns = STORM_SECONDS * 100
    words = f"n=0; while [ -e {mark} ] && [ $n -lt {turns} ]; do n=$((n + 1));"
    words += f" (sleep 0.05 &); sleep 0.01; done; exit # {mark}"
    os.execve("/bin/sh", ["sh", "-c", words], BARE)


KINDS: dict[str, Callable[[str, str], Any]] = {
    "nothing": lambda lives, mark: None,
    "child": lambda lives, mark: child(lives),
    "many": lambda lives, mark: [child(lives) for _ in range(30)],
    "daemon": lambda lives, mark: daemon(lambda: become(lives)),
    "daemon_closed": lambda lives, mark: daemon(lambda: apart(lives)),
    "pid_namespace": lambda lives, mark: child(lives, "unshare", "-p", "-f", "--mount-proc"),
    "pid_namespace_daemon": lambda lives, mark: daemon(
        lambda: os.execve("/usr/bin/unshare", ["unshare", "-pf", "/bin/sh", "-c", lives], BARE)
    ),
    "user_namespace": lambda lives, mark: child(lives, "unshare", "-U", "-r", "-m", "-p", "-f"),
    "stopped": stopped,
    "deaf": deaf,
    "deaf_to_all": lambda lives, mark: daemon(lambda: deaf_to_all(lives)),
    "other_user": lambda lives, mark: daemon(lambda: other_user(lives)),
    "forks": lambda lives, mark: daemon(lambda: forks_shells(mark)),
    "hops": lambda lives, mark: daemon(lambda: python(HOPS, mark, "0.004", "apart", env={})),
    "storm": lambda lives, mark: daemon(lambda: python(HOPS, mark, "0.001")),
    "storm_apart": lambda lives, mark: daemon(lambda: python(HOPS, mark, "0.001", "", env={})),
    "traced": traced,
    "first_thread_ended": first_thread_ended,
    "spawns": lambda lives, mark: daemon(lambda: python(SPAWNS, lives, mark, env={})),
    "holds_a_port": holds_a_port,
    "overwritten": overwritten,
    "ends_at_once": lambda lives, mark: daemon(lambda: become(lives)),
    "ends_before": lambda lives, mark: None,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
