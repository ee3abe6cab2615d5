"""Runs a server that starts a job, its supervisor and whoever stops it, step by step, in any order.

The code is the program's own, and so are its files, sockets and torchrun's process. What would be
processes are threads here, of which one runs at a time: each gives way before everything that
another could see, and the schedule says who goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import processes, supervisor
from orchestrator.node.job.job_processes import JobProcesses
from orchestrator.node.job.processes import Process
from orchestrator.node.job.ranks import agent_start
from orchestrator.node.job.run_directory import RunDir, listen_in
from orchestrator.node.job.supervisor import Supervisor
from orchestrator.node.server import visit as node_visit
from orchestrator.node.server.visit import Refusal, Visit
from orchestrator.node.start import start as node_start
from orchestrator.protocol.events import Ended, EndOrder, Started
from orchestrator.protocol.requests.follow import Stop, StopAll, StopReceipt
from orchestrator.protocol.requests.request import STOPPED
from orchestrator.protocol.requests.start import Start
from tests.node.running import PATIENCE, Job, spec_of

NUMBER = 2**22 + 1  # the PID of what is a supervisor here, and of no process
AGENT = ["/bin/sh", "-c", "exec sleep 1000"]
count = itertools.count()


class Killed(BaseException):
    """Ends a thread as SIGKILL ends a process."""


class Actor:
    """One that would be a process, and waits for its turn."""

    def __init__(self, name: str, work: Callable[[], object], back: threading.Semaphore) -> None:
        self.name, self.work, self.back = name, work, back
        self.turn = threading.Semaphore(0)
        self.waits = self.done = self.killed = False
        self.result: object = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.result = self.work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  raised again by whoever looks at results
            self.result = error
        self.done = True
        self.back.release()


class World:
    """One node, on which a job is started and stopped."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.job = Job(home, f"steps-{os.getpid()}-{next(count)}")
        self.run = self.job.run
        self.actors: list[Actor] = []
        self.back = threading.Semaphore(0)
        self.agents: list[subprocess.Popen[bytes]] = []
        self.supervisor: Actor | None = None
        self.stopped_at: list[int] = []  # how many agents there had been at each receipt
        self.steps = 0
        self.visit = Visit()  # the head is there before anybody stops anything
        self.install(patch)

    # -- turns -------------------------------------------------------------------------------

    def add(self, name: str, work: Callable[[], object]) -> Actor:
        actor = Actor(name, work, self.back)
        self.actors.append(actor)
        actor.thread.start()
        return actor

    def point(self, *, waits: bool = False) -> None:
        """Give way to whoever is next."""
        actor = next((a for a in self.actors if a.thread is threading.current_thread()), None)
        if actor is None:
            return
        actor.waits = waits
        self.back.release()
        actor.turn.acquire()
        if actor.killed:
            raise Killed

    def go(self, choose: Callable[[int, list[Actor]], Actor]) -> None:
        """Run all to their ends."""
        deadline, looks = time.monotonic() + PATIENCE, 0
        while True:
            living = [actor for actor in self.actors if not actor.done]
            if not living:
                return
            assert time.monotonic() < deadline, [actor.name for actor in living]
            able = [actor for actor in living if not actor.waits]
            if able:
                self.step(choose(self.steps, able))
            else:  # for a real process: whoever sees it first
                time.sleep(0.001)
                looks += 1
                self.step(living[looks % len(living)])
            self.check()

    def step(self, actor: Actor) -> None:
        self.steps += not actor.waits
        actor.turn.release()
        assert self.back.acquire(timeout=PATIENCE), f"{actor.name} does not give way"
        if not actor.waits or actor.done:
            for other in self.actors:
                other.waits = False

    # -- what must hold ----------------------------------------------------------------------

    def agents_alive(self) -> list[int]:
        running = [processes.find(agent.pid) for agent in self.agents]
        return [p.pid for p in running if p is not None and p.state not in "ZX"]

    def check(self) -> None:
        """After every step: no file says that the job has ended while torchrun lives."""
        if self.run.last(Ended) is not None:
            assert not self.agents_alive()

    # -- who there is ------------------------------------------------------------------------

    def start(self) -> bool:
        """Start the job as the server does; False if that was refused because it was stopped."""
        spec = self.job.spec({"kind": "script", "name": "x", "args": []}, agent=AGENT)
        try:
            self.visit.answer(Start(spec=spec_of(spec)))
        except Refusal as refusal:
            assert refusal.kind == STOPPED, refusal
            return False
        return True

    def stop(self) -> StopReceipt:
        order = Stop(job=self.run.job, node=0, why="enough", grace=0.0, wait=PATIENCE)
        receipt = stop_job.stop(self.run, order)
        assert not receipt.left and not self.agents_alive()
        self.stopped_at.append(len(self.agents))
        return receipt

    def stop_all(self) -> None:
        order = StopAll(why="enough", grace=0.0, wait=PATIENCE)
        assert all(not receipt.left for receipt in stop_job.stop_all(order))
        assert not self.agents_alive()
        self.stopped_at.append(len(self.agents))

    def end(self) -> None:
        stop_job.end(self.run, EndOrder(why="not started", grace=0.0))

    def kill_supervisor(self) -> None:
        if self.supervisor is not None:
            self.supervisor.killed = True
            for agent in self.agents:  # as the kernel does, for PR_SET_PDEATHSIG
                with contextlib.suppress(OSError):
                    os.kill(agent.pid, signal.SIGTERM)

    def supervise(self, ready: int) -> None:
        """Be the supervisor, and give back what a process gives back at its end."""
        opened: list[socket.socket] = []
        self.sockets = opened
        job, handed_over = None, False
        try:
            self.point()
            job = Supervisor(self.run)
            job.selector = Selector(job.selector, self)  # type: ignore[assignment]
            handed_over = True
            supervisor.run_job(job, ready)
        finally:
            own = {connection.fileno() for connection in opened}
            own |= {listener.fileno() for listener in (job.listeners.connections if job else [])}
            for connection in [*opened, *(job.listeners.connections if job else [])]:
                connection.close()
            fds = set() if handed_over else {ready}
            if job is not None:
                fds |= {*job.selector.own.get_map(), job.events.fd, job.log.log, job.log.ranks}
                fds |= {vars(job).get("wakeup", -1)}
            for fd in fds - own:
                with contextlib.suppress(OSError):
                    os.close(fd)

    # -- the program's own code, with turns in it --------------------------------------------

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in (
            *((RunDir, name) for name in ("create", "forbid_start", "append_event", "write_spec")),
            *((Supervisor, name) for name in ("listen", "start_agent", "finish", "event")),
            (JobProcesses, "living"),
            (stop_job, "note_stop_of_all"),
            (node_visit, "stop_of_all"),
        ):
            patch.setattr(owner, name, self.with_turn(getattr(owner, name)))
        is_forbidden = RunDir.start_is_forbidden.fget  # type: ignore[attr-defined]
        patch.setattr(RunDir, "start_is_forbidden", property(self.with_turn(is_forbidden)))
        connect = self.with_turn(stop_job.connect)
        patch.setattr(stop_job, "connect", lambda run: Connection(connect(run), self))
        patch.setattr(stop_job, "LAST_WORD_SECONDS", 0.0)
        patch.setattr(concurrent.futures, "ThreadPoolExecutor", OneByOne)
        poll = SimpleNamespace(poll=lambda: Poll(self), POLLIN=select.POLLIN)
        patch.setattr(processes, "select", poll)
        patch.setattr(processes, "everyone", self.everyone)
        find = lambda of, _: self.find_supervisors(of)  # noqa: E731  a method of that class
        patch.setattr(JobProcesses, "find_supervisors", find)
        alive, send = processes.alive, processes.send
        patch.setattr(processes, "alive", lambda p: self.lives() if p.pid == NUMBER else alive(p))
        patch.setattr(
            processes, "send", lambda p, n: self.kill(n) if p.pid == NUMBER else send(p, n)
        )
        patch.setattr(
            node_start,
            "subprocess",
            SimpleNamespace(Popen=self.spawn, DEVNULL=None, PIPE=None),
        )
        patch.setattr(node_start, "select", SimpleNamespace(select=self.select))
        own = {"Popen": self.popen, "DEVNULL": subprocess.DEVNULL}
        patch.setattr(supervisor, "subprocess", SimpleNamespace(**own))
        patch.setattr(supervisor, "listen_in", self.listen_in)
        for module in (supervisor, agent_start):
            patch.setattr(module, "prctl", lambda *_: None)
        patch.setattr(supervisor.signal, "set_wakeup_fd", lambda *_: None)
        patch.setattr(supervisor.signal, "signal", lambda *_: None)
        patch.setattr(supervisor.os, "waitpid", self.waitpid)
        patch.setattr(supervisor.resource, "setrlimit", lambda *_: None)

    def with_turn(self, function: Any) -> Any:
        def then(*args: Any, **options: Any) -> Any:
            self.point()
            result = function(*args, **options)
            self.point()
            return result

        return then

    def everyone(
        self, examine: Callable[[Process], bool] = bool, _: object = None
    ) -> dict[int, Process]:
        found = [processes.find(agent.pid) for agent in self.agents]
        running = {process.pid: process for process in found if process is not None}
        for process in running.values():
            examine(process)
        return running

    def lives(self) -> bool:
        actor = self.supervisor
        return actor is not None and not actor.done and not actor.killed

    def find_supervisors(self, of: JobProcesses) -> list[Process]:
        there = self.lives() and not of.supervisor
        return [Process(NUMBER, 1, 1, "S", "python")] if there else []

    def kill(self, number: int) -> bool:
        self.kill_supervisor()
        return True

    def spawn(self, *_: Any, **__: Any) -> Any:
        reading, ready = os.pipe()
        self.supervisor = self.add("supervisor", lambda: self.supervise(ready))
        stdout = os.fdopen(reading, "rb", buffering=0)
        self.point()
        return SimpleNamespace(stdout=stdout, kill=self.kill_supervisor, pid=NUMBER)

    def select(self, files: list[Any], *_: Any) -> tuple[list[Any], list[Any], list[Any]]:
        while not select.select(files, [], [], 0)[0]:
            self.point(waits=True)
        return files, [], []

    def popen(self, *args: Any, **options: Any) -> subprocess.Popen[bytes]:
        self.agents.append(subprocess.Popen(*args, **options))
        return self.agents[-1]

    def listen_in(self, path: str) -> socket.socket:
        self.sockets.append(listen_in(path))
        return self.sockets[-1]

    def waitpid(self, _: int, options: int) -> tuple[int, int]:
        for agent in self.agents:
            with contextlib.suppress(ChildProcessError):
                pid, status = WAITPID(agent.pid, options)
                if pid:
                    return pid, status
        raise ChildProcessError

    def clear(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        shutil.rmtree(Path(self.run.path).parents[1], ignore_errors=True)


WAITPID = os.waitpid


class Selector:
    """A selector that gives way where it would wait."""

    def __init__(self, own: Any, world: World) -> None:
        self.register, self.unregister, self.own, self.world = (
            own.register, own.unregister, own, world,
        )  # fmt: skip

    def select(self, timeout: float) -> list[Any]:
        ready: list[Any] = self.own.select(0)
        self.world.point(waits=not ready)
        return ready


class Poll:
    def __init__(self, world: World) -> None:
        self.own, self.world = select.poll(), world
        self.register = self.own.register

    def poll(self, milliseconds: float) -> list[Any]:
        ready = self.own.poll(0)
        if milliseconds and not ready:
            self.world.point(waits=True)
        return ready


class Connection:
    """The end of a connection at whoever stops the job."""

    def __init__(self, own: socket.socket, world: World) -> None:
        self.own, self.world = own, world
        own.setblocking(False)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.own.close()

    def sendall(self, data: bytes) -> None:
        self.world.point()
        self.own.sendall(data)

    def settimeout(self, _: float) -> None:
        pass

    def recv(self, size: int) -> bytes:
        while True:
            try:
                return self.own.recv(size)
            except BlockingIOError:
                self.world.point(waits=True)


class OneByOne:
    """A pool of threads whose work is done by the one who asks."""

    def __init__(self, _: int) -> None:
        pass

    def __enter__(self) -> OneByOne:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Any, items: Any) -> Iterator[Any]:
        return map(function, items)


def is_over(world: World) -> bool:
    """Tell whether the job can do nothing more, and its files say so if it had begun."""
    started, ended = world.run.last(Started), world.run.last(Ended)
    return not world.agents_alive() and (ended is not None or started is None)
