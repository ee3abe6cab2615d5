"""The process that waits on a node with torch imported: `python -u standby.py DIRECTORY FD ROOM`.

For a job it forks. The child becomes the job's torchrun, and the process itself executes the
supervisor, whose child torchrun is, as after a cold start. What a cold start would have set before
its first line (environment, arguments, limits, directory, files) is set then. The ranks are forked
from here, so it imports nothing of ours and leaves no trace of its own files in sys.modules.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.machinery
import json
import os
import select
import shutil
import site
import socket
import sys
import time
import types
from collections.abc import Sequence
from typing import Any, NoReturn

TICK_SECONDS = 15.0  # between two looks at the files that it came from: 0.1 ms
PATIENCE_SECONDS = 10.0  # for a caller to say what it wants
MOST_FILES = 253  # that Linux lets one message carry


def main() -> None:
    directory, listening = sys.argv[1:3]
    server = socket.socket(fileno=int(listening))
    ranks = [os.path.dirname(os.path.abspath(__file__)), os.pardir, "job", "ranks"]
    agent_start = load("agent_start", *ranks)
    fast_torchrun = load("fast_torchrun", *ranks)
    interpreter = load("interpreter", *ranks)
    fast_torchrun.begin_path_here()  # not with this file's directory, which is ours
    # An optimizer imports torch._dynamo when it is made: 1.5 s in each rank.
    torchrun = fast_torchrun.import_torch("torch._dynamo")
    files = files_it_came_from()
    with open("ready", "w"):  # its own directory is the current one, whatever its name is
        pass
    caller, order, passed = wait_for_order(directory, server, files)
    changed = [path for path, mark in files.items() if mark_of(path) != mark]
    if changed:
        send(caller, {"no": f"{changed[0]} has changed"})
        return
    send(caller, {"yes": True})
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid:
        agent_start.set_limits(order["limits"])
        supervise(order, passed, pid, ours)
    for each in (server, caller, ours):
        each.close()
    for fd in passed:
        os.close(fd)
    become_torchrun(its, agent_start, interpreter)
    fast_torchrun.run(torchrun)


def load(name: str, *directory: str) -> Any:
    """Load a file of ours without a trace in sys.modules: the ranks would see it."""
    module = types.ModuleType("orchestrator_" + name)
    module.__file__ = path = os.path.join(*directory, name + ".py")
    importlib.machinery.SourceFileLoader(module.__name__, path).exec_module(module)
    return module


# -- messages ---------------------------------------------------------------------------------


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send one line of JSON, and open files with it."""
    line = json.dumps(message).encode("ascii") + b"\n"
    sent = socket.send_fds(connection, [line], list(files)) if files else 0
    if sent < len(line):  # A receiver of the whole line may be gone already.
        connection.sendall(line[sent:])


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its open files; raise an EOFError if the sender is gone."""
    flags = socket.MSG_CMSG_CLOEXEC
    line, files, _, _ = socket.recv_fds(connection, 1 << 16, MOST_FILES, flags)
    while not line.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            raise EOFError("the sender is gone")
        line += more
    return json.loads(line), files


# -- waiting ----------------------------------------------------------------------------------


def wait_for_order(
    directory: str, server: socket.socket, files: dict[str, list[int]]
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Return a job's order, with its caller and its files; exit if there is no reason to wait.

    A caller renames the directory first, so that only one of them has this process.
    """
    places = {path: mark for path, mark in files.items() if os.path.isdir(path)}
    while True:
        left = os.stat("standby.json").st_mtime - time.time()
        if select.select([server], [], [], max(0.0, min(TICK_SECONDS, left)))[0]:
            caller, _ = server.accept()
            caller.settimeout(PATIENCE_SECONDS)
            with contextlib.suppress(OSError, EOFError, ValueError):
                return caller, *receive(caller)
            sys.exit()
        if must_leave(places):
            with contextlib.suppress(OSError):
                os.rename(directory, directory + ".gone")
                shutil.rmtree(directory + ".gone")
                sys.exit()
            if not select.select([server], [], [], TICK_SECONDS)[0]:
                sys.exit()  # the caller that renamed the directory is gone


def must_leave(places: dict[str, list[int]]) -> bool:
    """Return True if waiting is wrong by now."""
    # A package that comes or goes changes its directory.
    changed = any(mark_of(path) != mark for path, mark in places.items())
    late = time.time() >= os.stat("standby.json").st_mtime
    return changed or late or not os.path.exists(__file__)


def files_it_came_from() -> dict[str, list[int]]:
    """Return each file that was imported and each place of packages, as they are now."""
    places = [*sys.path[1:], *site.getsitepackages()]  # one that is made later is searched as well
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    paths = {os.path.join(sys.prefix, "pyvenv.cfg"), *places}
    for place in places:
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(place) if name.endswith(".pth")]
            paths.update(os.path.join(place, name) for name in names)
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths.update(path for path in modules if isinstance(path, str))
    return {path: mark_of(path) for path in paths}


def mark_of(path: str) -> list[int]:
    """Return what changes with a file; nothing if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return []
    return [status.st_mtime_ns, status.st_size, status.st_ino]


# -- a job ------------------------------------------------------------------------------------


def supervise(
    order: dict[str, Any], passed: list[int], agent: int, control: socket.socket
) -> NoReturn:
    """Execute the job's supervisor with the files that the caller passed, under its numbers."""
    above = max(order["numbers"]) + 1
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in (*passed, control.fileno())]
    for fd, number in zip(held, order["numbers"]):  # noqa: B905  Python 3.9
        os.dup2(fd, number)
    os.set_inheritable(held[-1], True)
    os.chdir(order["directory"])
    job = [str(agent), str(held[-1]), *order["job"]]
    words = [respelt(word) for word in (*order["program"], *job)]
    variables = order["environ"].items()
    os.execve(words[0], words, {respelt(name): respelt(value) for name, value in variables})


def become_torchrun(control: socket.socket, agent_start: Any, interpreter: Any) -> None:
    """Be what a cold start is before its first line; where that cannot be, execute it."""
    try:
        start, (output,) = receive(control)
    except (EOFError, OSError):
        os._exit(1)  # the supervisor is gone
    control.close()
    os.setsid()
    start["directory"] = respelt(start["directory"])
    agent_start.settle(start)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    environment = {respelt(name): respelt(value) for name, value in start["environment"].items()}
    command = [respelt(word) for word in start["command"]]
    before, now = executed_with(), dict(os.environ)
    # What Python or torch have set or removed since (LC_CTYPE in the locale C) stays so.
    changed = {name: value for name, value in now.items() if before.get(name) != value}
    os.environ.clear()
    os.environ.update({n: v for n, v in environment.items() if n in now or n not in before})
    os.environ.update(changed)
    # What stood first in this memory stays there: C code may have kept pointers to it.
    first = {name: environment[name] for name in before if name in environment}
    if not interpreter.show_environment({**first, **environment}):
        os.execvpe(command[0], command, environment)
    interpreter.show_command(command)
    time.tzset()
    sys.argv = command[2:]
    if hasattr(sys, "orig_argv"):  # since Python 3.10
        sys.orig_argv = command
    sys.path_importer_cache.pop(sys.path[0], None)


def executed_with() -> dict[str, str]:
    """Return the environment that this process began with."""
    with open("/proc/self/environ", "rb") as file:
        lines = (line.partition(b"=") for line in file.read().split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in lines if equals}


def respelt(word: str) -> str:
    """Spell a word as this Python reads it in its own locale; it came as UTF-8."""
    return os.fsdecode(word.encode("utf-8", "surrogateescape"))


if __name__ == "__main__":
    main()
