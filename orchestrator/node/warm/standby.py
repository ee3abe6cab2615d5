"""The standby process, with torch imported: `python -u standby.py DIRECTORY FD ROOM`.

For a job it forks. The child becomes the job's torchrun, and the process itself executes the
supervisor, whose child torchrun is, as after a cold start. The settings of a cold start
(environment, arguments, limits, directory, files) are applied then. The ranks are forked
from here, so it imports nothing of this package and puts none of its files in sys.modules.
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

# The interval of the checks of the imported files, each of which takes 0.1 ms.
TICK_SECONDS = 15.0
# A caller has this long to send its order; no table of the package is imported here.
ORDER_SECONDS = 10.0
# Linux passes at most this many descriptors in one message.
MOST_FILES = 253


def main() -> None:
    directory, listening = sys.argv[1:3]
    server = socket.socket(fileno=int(listening))
    ranks = [os.path.dirname(os.path.abspath(__file__)), os.pardir, "job", "ranks"]
    agent_start = load("agent_start", *ranks)
    fast_torchrun = load("fast_torchrun", *ranks)
    interpreter = load("interpreter", *ranks)
    # The first entry of the path is this file's directory, which belongs to this package.
    fast_torchrun.begin_path_here()
    # The first optimizer imports torch._dynamo, which takes 1.5 s in each rank.
    torchrun = fast_torchrun.import_torch("torch._dynamo")
    files = files_it_came_from()
    # The current directory is the standby's own, even after it was renamed.
    with open("ready", "w"):
        pass
    caller, order, passed = wait_for_order(directory, server, files)
    changed = [path for path, mark in files.items() if mark_of(path) != mark]
    if changed:
        send_message(caller, {"no": f"{changed[0]} has changed"})
        return
    send_message(caller, {"yes": True})
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
    """Load a file of this package without an entry in sys.modules, which the ranks would see."""
    module = types.ModuleType("orchestrator_" + name)
    module.__file__ = path = os.path.join(*directory, name + ".py")
    importlib.machinery.SourceFileLoader(module.__name__, path).exec_module(module)
    return module


# -- messages ---------------------------------------------------------------------------------


def send_message(
    connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()
) -> None:
    """Send one line of JSON, and open files with it."""
    line = json.dumps(message).encode("ascii") + b"\n"
    sent = socket.send_fds(connection, [line], list(files)) if files else 0
    # A receiver that has the whole line may be gone already.
    if sent < len(line):
        connection.sendall(line[sent:])


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
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
    """Return the socket, the order and the files of a job; exit if there is no reason to wait.

    A caller renames the directory first, so that only one of them has this process.
    """
    places = {path: mark for path, mark in files.items() if os.path.isdir(path)}
    while True:
        left = os.stat("standby.json").st_mtime - time.time()
        if select.select([server], [], [], max(0.0, min(TICK_SECONDS, left)))[0]:
            caller, _ = server.accept()
            caller.settimeout(ORDER_SECONDS)
            with contextlib.suppress(OSError, EOFError, ValueError):
                return caller, *receive_message(caller)
            sys.exit()
        if must_leave(places):
            with contextlib.suppress(OSError):
                os.rename(directory, directory + ".gone")
                shutil.rmtree(directory + ".gone")
                sys.exit()
            if not select.select([server], [], [], TICK_SECONDS)[0]:
                # The caller that renamed the directory is gone.
                sys.exit()


def must_leave(places: dict[str, list[int]]) -> bool:
    """Return True if the process must not wait any longer."""
    # Installing or removing a package changes its directory.
    changed = any(mark_of(path) != mark for path, mark in places.items())
    late = time.time() >= os.stat("standby.json").st_mtime
    return changed or late or not os.path.exists(__file__)


def files_it_came_from() -> dict[str, list[int]]:
    """Return the state of each imported file and of each package directory."""
    # A directory created later would be searched as well.
    places = [*sys.path[1:], *site.getsitepackages()]
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
    """Return the time, size and inode of a file, which change with it; empty if there is none."""
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
    for fd, number in zip(held, order["numbers"]):
        os.dup2(fd, number)
    os.set_inheritable(held[-1], True)
    os.chdir(order["directory"])
    job = [str(agent), str(held[-1]), *order["job"]]
    words = [respelt(word) for word in (*order["program"], *job)]
    variables = order["environ"].items()
    os.execve(words[0], words, {respelt(name): respelt(value) for name, value in variables})


def become_torchrun(control: socket.socket, agent_start: Any, interpreter: Any) -> None:
    """Bring this process to the state of a cold start; if that is impossible, execute one."""
    try:
        start, (output,) = receive_message(control)
    except (EOFError, OSError):
        # The supervisor is gone.
        os._exit(1)
    control.close()
    os.setsid()
    start["directory"] = respelt(start["directory"])
    agent_start.apply_settings(start)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    environment = {respelt(name): respelt(value) for name, value in start["environment"].items()}
    command = [respelt(word) for word in start["command"]]
    before, now = executed_with(), dict(os.environ)
    # Variables that Python or torch have changed since the start stay (LC_CTYPE in locale C).
    changed = {name: value for name, value in now.items() if before.get(name) != value}
    os.environ.clear()
    os.environ.update({n: v for n, v in environment.items() if n in now or n not in before})
    os.environ.update(changed)
    # Variables keep their order in this memory: C code may hold pointers to them.
    first = {name: environment[name] for name in before if name in environment}
    if not interpreter.show_environment({**first, **environment}):
        os.execvpe(command[0], command, environment)
    interpreter.show_command(command)
    time.tzset()
    sys.argv = command[2:]
    # Python has this attribute since 3.10.
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = command
    sys.path_importer_cache.pop(sys.path[0], None)


def executed_with() -> dict[str, str]:
    """Return the environment that this process was started with."""
    with open("/proc/self/environ", "rb") as file:
        lines = (line.partition(b"=") for line in file.read().split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in lines if equals}


def respelt(word: str) -> str:
    """Return a word, received as UTF-8, in the encoding of this Python's locale."""
    return os.fsdecode(word.encode("utf-8", "surrogateescape"))


if __name__ == "__main__":
    main()
