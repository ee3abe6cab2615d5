"""Runs `orchestrator ...` in a fork of a Python that has imported it already.

A Python that starts anew takes 0.2 s of a core; tests/cli/test_run.py tests the start itself.
`typed` forks the tests' own process. `start` asks a small one of its own, `python -m tests.typed`,
which has no threads and none of what a test has changed; it serves all tests of a worker.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from orchestrator import entry

ROOT = Path(__file__).parents[1]
ENTRIES = {
    "orchestrator": entry.main,
    "master_launch": entry.master_launch,
    "emergency_stop": entry.emergency_stop,
}
ROOMS = ("cli", "common", "config", "head", "protocol", "records")  # those of a head


def typed(words: Sequence[str], cwd: Path, **env: str) -> tuple[int, str, str]:
    """Return the exit code, the standard output and the standard error."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            streams = [output.fileno(), errors.fileno()]
            become(["orchestrator", *words], cwd, {**os.environ, **env}, streams)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    assert "Traceback" not in texts[1], texts[1]
    return code, *texts


def become(words: Sequence[str], cwd: Path, env: Mapping[str, str], streams: list[int]) -> NoReturn:
    """Run the command as the installed program does; this process ends with it."""
    code = 1
    try:
        files = [os.open(os.devnull, os.O_RDONLY), *streams]
        for number, file in enumerate(files):
            os.dup2(file, number)
        for file in {*files} - {0, 1, 2}:
            os.close(file)  # one that leaves its output has left it
        encoding = env.get("PYTHONIOENCODING", "utf-8")
        sys.stdin, sys.stdout = open(0), open(1, "w", encoding=encoding)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            2, "w", encoding=encoding, errors="backslashreplace", buffering=1
        )
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(words)
        ENTRIES[Path(words[0]).name]()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:  # noqa: BLE001  the tests go on in the other process alone
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        os._exit(code)


class Typed:
    """A command that runs: what of subprocess.Popen its tests use."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or that of the signal that ended it, below zero."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since then
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(words: Sequence[str], cwd: Path, env: Mapping[str, str], output: int) -> Typed:
    """Run a command in a session of its own, which writes all that it says to `output`."""
    reading, writing = os.pipe()
    mask = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert mask is not None
    request = [list(map(str, words)), str(cwd), dict(env), int(mask[1], 8)]
    forker = forking()
    socket.send_fds(forker, [json.dumps(request).encode()], [output, writing])
    os.close(writing)
    return Typed(int(forker.recv(16)), reading)


FORKING: list[subprocess.Popen[bytes]] = []  # kept: one that is dropped while it runs is a warning


@functools.cache
def forking() -> socket.socket:
    """The other process ends when this socket is closed, which is when the tests are over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        FORKING.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.typed", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        )
    return ours


# -- in the process that forks --------------------------------------------------------------------


def main() -> None:
    gc.disable()
    for room in ROOMS:
        package = importlib.import_module(f"orchestrator.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control, selectors.DefaultSelector() as events:
        events.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is not control:
                    events.unregister(key.fileobj)
                    tell_the_end(key.fd, *key.data)
                    continue
                if not (child := fork(control)):
                    return
                pid, status = child
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


def tell_the_end(pidfd: int, pid: int, status: int) -> None:
    os.close(pidfd)
    os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os.close(status)


def fork(control: socket.socket) -> tuple[int, int] | None:
    """Begin the next command; return its process and where its end is told."""
    message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2, socket.MSG_CMSG_CLOEXEC)
    if not message:
        return None
    (output, status), (words, cwd, env, mask) = fds, json.loads(message)
    pid = os.fork()
    if not pid:
        os.setsid()
        os.umask(mask)
        control.close()
        os.close(status)
        gc.enable()
        become(words, Path(cwd), env, [output, output])
    os.close(output)
    control.send(str(pid).encode())
    return pid, status


if __name__ == "__main__":
    main()
