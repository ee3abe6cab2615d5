"""A supervisor in waiting: `python <library> standby KEY`, with torchrun in waiting as its child.

It listens in ~/.orchestrator/warm/KEY, belongs to no job, and becomes the supervisor of the first
job that is handed over to it; or it ends: after its idle time, when memory is short, when packages
are installed or its program is removed, or when it is asked to.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from orchestrator.node.job import processes
from orchestrator.node.job.ranks import process_title
from orchestrator.node.job.ranks.agent_start import PR_SET_PDEATHSIG, AgentStart, prctl, set_limits
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.job.supervisor import Supervisor, run_job
from orchestrator.node.warm import frames
from orchestrator.node.warm.ahead import with_open_port
from orchestrator.node.warm.pairs import (
    ROOM_VARIABLE,
    TOKEN_VARIABLE,
    left_file,
    note_reason,
    read,
    unfit_file,
)
from orchestrator.protocol.spec import Spec

AGENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent.py")
TICK_SECONDS = 15.0  # between two looks at memory and program: 0.1 ms each
PATIENCE_SECONDS = 2.0  # for whoever calls to say what they want
LEAST_MEMORY = 0.08  # part of the machine's memory that must stay available
MOST_RESTARTS = 8
SESSION = {
    *("PWD", "OLDPWD", "SHLVL", "_", "XDG_SESSION_ID", TOKEN_VARIABLE, ROOM_VARIABLE),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK"),
}


class Leave(Exception):
    """Raised when nothing is to be waited for any more, with a reason for who launches next."""


class Standby:
    """The process that waits, until it leaves or becomes a supervisor."""

    def __init__(self, directory: str, server: socket.socket, job: dict[str, str]) -> None:
        self.directory = directory
        self.server = server
        self.job = job  # variables of the job that it was started after
        pair = read(directory)
        if pair is None:
            raise OSError(f"no pair is described in {directory}")
        self.pair = pair
        self.modules = list(pair.modules)
        self.environment: dict[str, str] = {}  # of the agent
        self.until = time.monotonic() + pair.idle
        self.skip: list[str] = []
        self.asked = 0  # of the pair's modules, how many the agent was told to import
        self.ready = False  # it has imported them
        self.restarts = 0
        self.job_taken: tuple[Spec, dict[str, Any], list[int]] | None = None  # with open files
        self.reads: set[str] = set()  # variables
        self.lists: set[str] = set()  # packages that look through all variables
        self.files: dict[str, list[int]] = {}  # that it has imported, as they were then
        self.places: dict[str, list[int]] = {}  # what is imported from, as it was then
        self.spawn()

    def spawn(self) -> None:
        """Start the agent in waiting."""
        self.control, its = socket.socketpair()
        words = ["-u", AGENT, str(its.fileno()), " " * self.pair.room]
        self.command = [self.pair.python, *words]
        self.agent = subprocess.Popen(
            [self.pair.python, "-S", *words],
            env=self.variables({**self.job, **self.pair.environment}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[its.fileno()],
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
        )
        its.close()
        self.asked, self.reads, self.lists, self.files = 0, set(), set(), {}

    def variables(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the login with these variables, and without the job's unset."""
        unset = self.pair.unset
        return {n: v for n, v in {**os.environ, **own}.items() if n not in unset}

    def begin(self, report: dict[str, Any]) -> None:
        """Let the agent begin with the variables that are read while Python starts, and import."""
        self.note(report)
        read = self.names_read(self.job)
        own = {name: value for name, value in self.job.items() if name in read}
        self.environment = self.variables({**own, **self.pair.environment})
        order = {"begin": self.command, "environment": self.environment}
        frames.send(self.control, order)
        self.import_more()

    def note(self, report: dict[str, Any]) -> None:
        self.reads.update(report["reads"])
        self.lists.update(report["lists"])

    def names_read(self, environment: Mapping[str, str]) -> set[str]:
        """Return the variables that were read, with those of a name that was listed."""
        own = tuple(f"{package.lower()}_" for package in self.lists)
        return self.reads | {name for name in environment if name.lower().startswith(own)}

    def import_more(self) -> None:
        """Tell the agent to import what it was not told yet; it listens when it is ready."""
        modules = self.modules[self.asked :]
        frames.send(self.control, {"modules": modules, "skip": self.skip})
        self.asked += len(modules)
        self.ready = False

    # -- waiting -----------------------------------------------------------------------------

    def wait(self) -> None:
        """Answer who calls, until there is a job or no reason to wait."""
        try:
            while True:
                poll = select.poll()
                poll.register(self.server, select.POLLIN)
                poll.register(self.control, select.POLLIN)
                left = min(TICK_SECONDS, self.until - time.monotonic())
                for fd, _ in poll.poll(max(0.0, left) * 1000):
                    if fd == self.control.fileno():
                        self.hear_agent()
                    else:
                        self.accept()
                    if self.job_taken is not None:  # none of its errors is a caller's
                        become(self, *self.job_taken)
                self.check()
        except Leave as reason:
            self.leave(str(reason))

    def hear_agent(self) -> None:
        try:
            report, _ = frames.receive(self.control)
        except (EOFError, OSError, ValueError):
            raise Leave("its torchrun ended") from None
        if "start" in report:
            self.begin(report)
            return
        if "ready" in report:
            self.ready = True
            self.note(report)
            self.files = {**report["files"], **self.files}  # a file is what it was at its import
            self.places = {p: mark for p, mark in self.files.items() if os.path.isdir(p)}
            if self.asked < len(self.modules):
                self.import_more()
            return
        self.stop_agent()
        self.restarts += 1
        if not report["packages"] or self.restarts > MOST_RESTARTS:
            note_reason(unfit_file(self.directory), report["unfit"])
            raise Leave
        self.skip += report["packages"]
        self.spawn()

    def check(self) -> None:
        """Leave where waiting is wrong by now."""
        if not os.path.exists(AGENT) or not os.path.exists(self.directory):
            raise Leave("its program was removed")
        # A package that comes or goes changes its directory. No job could start from here any more.
        changed = [path for path, mark in self.places.items() if frames.mark(path) != mark]
        if changed:
            raise Leave(f"{changed[0]} changed")
        if time.monotonic() >= self.until:
            raise Leave("its time was over")
        if memory_is_short():
            raise Leave("memory was short")

    def accept(self) -> None:
        try:
            caller, _ = self.server.accept()
        except OSError:
            return
        with caller:
            caller.settimeout(PATIENCE_SECONDS)
            with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
                if processes.peer(caller).uid == os.getuid():
                    self.serve(caller)

    def serve(self, caller: socket.socket) -> None:
        question, files = frames.receive(caller)
        try:
            if question["do"] == "stay":
                self.until = time.monotonic() + float(question["seconds"])
                known = {*self.modules}
                self.modules += [n for n in question["modules"] if n not in known]
                if self.ready and self.asked < len(self.modules):
                    self.import_more()
            if question["do"] in ("look", "stay"):
                idle = max(0.0, self.until - time.monotonic())
                state = {"ready": self.ready, "left": idle, "agent": self.agent.pid}
                frames.send(caller, {**state, "skipped": self.skip})
            elif question["do"] == "leave":
                raise Leave
            elif question["do"] == "take":
                self.offer(caller, question, files)
        finally:
            for fd in files:
                with contextlib.suppress(OSError):
                    os.close(fd)

    # -- a job -------------------------------------------------------------------------------

    def offer(self, caller: socket.socket, order: dict[str, Any], files: list[int]) -> None:
        """Take a job, unless something has changed since the imports."""
        spec = RunDir(order["job"], order["node"]).read_spec()
        if not self.ready:  # the ranks import the rest themselves
            self.modules = []
            frames.send(self.control, {"do": "finish"})
        while not self.ready:  # the directory it imports in goes with the hand-over
            self.hear_agent()
        reason = self.outdated(order["environment"])
        frames.send(caller, {"no": reason} if reason else {"yes": os.getpid()})
        if reason:
            raise Leave
        answer, _ = frames.receive(caller)
        if answer.get("go") is True:
            self.job_taken = spec, order, [*files]
            files.clear()

    def outdated(self, environment: dict[str, str]) -> str:
        """Say what was imported differently from how a cold start would import it, or nothing."""
        for name in sorted(self.names_read({**self.environment, **environment}) - SESSION):
            if self.environment.get(name) != environment.get(name):
                return f"{name}, which a package reads when it is imported, differs"
        for path, before in self.files.items():
            if frames.mark(path) != before:
                return f"{path} has changed"
        return ""

    def stop_agent(self) -> None:
        self.control.close()
        self.agent.kill()
        self.agent.wait()

    def close(self) -> None:
        """Stop listening; another pair may take the place from here on."""
        self.server.close()
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.directory, "socket"))
        shutil.rmtree(self.directory, ignore_errors=True)

    def leave(self, reason: str) -> None:
        """Leave, and note why where somebody may wonder."""
        self.stop_agent()
        if reason and os.path.isdir(os.path.dirname(self.directory)):
            note_reason(left_file(self.directory), f"what waited there has left: {reason}")
        self.close()


class WarmSupervisor(Supervisor):
    """A supervisor whose agent is there already, and waits."""

    def __init__(self, run: RunDir, spec: Spec, standby: Standby) -> None:
        super().__init__(run, spec)
        self.standby = standby

    def spawn_agent(self, start: AgentStart, output: int) -> subprocess.Popen[bytes]:
        control = self.standby.control
        control.settimeout(START_SECONDS)
        with contextlib.suppress(BrokenPipeError):  # it has just been killed: reap() sees it
            frames.send(control, {**start}, [output])
        control.close()
        return self.standby.agent


START_SECONDS = 15.0


def become(standby: Standby, spec: Spec, order: dict[str, Any], files: list[int]) -> None:
    """Be the supervisor of a job to its end, as one that was started for it."""
    ready, errors, *held = files
    os.environ.clear()
    os.environ.update(order["environ"])
    process_title.show_environment(os.environ)
    names = [order["job"], str(order["node"])]
    program = [sys.executable, *processes.OPTIONS, order["library"], "supervise"]
    process_title.show_command([*program, *names])
    standby.close()
    os.dup2(errors, 2)
    os.close(errors)
    set_limits(order["limits"])
    os.chdir(order["directory"])
    time.tzset()
    spec = with_open_port(spec, held)
    run_job(WarmSupervisor(RunDir(spec.job, spec.node), spec, standby), ready)
    sys.exit()


def memory_is_short() -> bool:
    """Tell whether others need the memory that a warm process holds."""
    sizes = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                sizes[name] = int(rest.split()[0])
    if len(sizes) == 2 and sizes["MemAvailable"] < LEAST_MEMORY * sizes["MemTotal"]:
        return True
    try:
        with open("/proc/pressure/memory", encoding="ascii") as file:
            return float(file.readline().split()[2].partition("=")[2]) > MOST_STALLS_PERCENT
    except (OSError, ValueError, IndexError):  # a kernel that does not count stalls
        return False


MOST_STALLS_PERCENT = 10.0  # of the last minute in which some process waited for memory


def main(directory: str, fd: str) -> None:
    """Wait in a directory that was made for this process, on a socket that listens there."""
    with open(0, "rb", closefd=False) as pipe:
        job = json.loads(pipe.read())  # the directory is there once nobody holds the other end
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    server = socket.socket(fileno=int(fd))
    server.setblocking(False)
    os.chdir(directory)
    Standby(directory, server, job).wait()
