"""Owns one job's processes on one node: starts torchrun, keeps the log, ends everything, says how.

Runs in its own session and outlives the SSH connection that started it. It writes `log`, `ranks`
and `events.jsonl` in the run directory and listens on `socket` there: a byte to every listener
means "there is something new in the files", a line of JSON from a listener is a request.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from orchestrator.node.job import processes
from orchestrator.node.job.job_log import JobLog
from orchestrator.node.job.oom_evidence import Evidence, last_words
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.peers.lease import PEER_GRACE, Lease

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
F_SETPIPE_SZ = 1031
READ = 1 << 20
RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.py")
FAILED_GRACE = 1.0  # after a rank failed, its siblings may still say why; then they are killed
SWEEP_GRACE = 0.5  # what outlives torchrun gets this long between SIGTERM and SIGKILL
EVENTS_ROOM = 1 << 18  # a job's last word must find room when its log has filled the disk
SWEEP_LIMIT = 10.0  # a process that survives SIGKILL this long hangs in the kernel


class Supervisor:
    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.spec = run.read_spec()
        self.log = JobLog(run.log, run.ranks)
        self.evidence = Evidence()
        self.events = os.open(run.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        reserve(self.events, EVENTS_ROOM)
        self.unsaid = b""  # what a full disk refused of the events
        self.selector = selectors.DefaultSelector()
        self.outputs: dict[int, str] = {}  # file descriptor -> stream
        self.listeners: list[socket.socket] = []
        self.agent: subprocess.Popen[bytes] | None = None
        self.agent_code: int | None = None
        self.ranks: dict[int, dict[str, Any]] = {}
        self.report_rest = b""
        self.asked = False
        self.why = ""  # why it is being ended; empty while it just runs
        self.end_since = float("inf")  # Unix time
        self.kill_at = float("inf")
        self.sweep_since = 0.0
        self.killed: dict[int, str] = {}
        self.lease = Lease(self, self.spec)

    # -- start -------------------------------------------------------------------------------

    def start(self) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        wake, self.wakeup = os.pipe()
        for fd in (wake, self.wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: self.ask("its supervisor was told to stop", 10.0))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.watch(wake, lambda: os.read(wake, 4096))
        for local in range(self.spec["nproc"]):
            stream = str(self.spec["first_rank"] + local)
            self.watch_output(open_fifo(self.run.fifo(local)), stream)
        self.reports = open_fifo(self.run.reports)
        self.watch(self.reports, self.read_reports)
        self.listen()
        self.start_agent()

    def start_agent(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        env = {**os.environ, **self.spec["env"], "ORCHESTRATOR_RUN": self.run.path}
        for name in self.spec["unset"]:
            env.pop(name, None)
        self.agent = subprocess.Popen(
            [*self.spec["agent"], f"--log-dir={self.run.path}/torchelastic", RANK],
            cwd=self.run.path,  # `-m` puts it on torchrun's path; the ranks go to the workdir
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
            # Should we be killed, torchrun ends its ranks: nobody would read what they print.
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  no threads
        )
        os.close(writing)
        self.watch_output(reading, "-")
        self.event("started", agent=self.agent.pid, supervisor=os.getpid())

    def listen(self) -> None:
        # A socket's path may have 108 bytes only; relative to the run directory it is short.
        os.chdir(self.run.path)
        server = socket.socket(socket.AF_UNIX)
        server.bind("socket")
        os.chmod("socket", 0o600)
        server.listen(16)
        server.setblocking(False)
        self.watch(server.fileno(), lambda: self.accept(server))

    # -- the loop ----------------------------------------------------------------------------

    def watch(self, fd: int, then: Callable[[], Any]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, then)

    def unwatch(self, fd: int) -> None:
        self.selector.unregister(fd)

    def watch_output(self, fd: int, stream: str) -> None:
        self.outputs[fd] = stream
        self.watch(fd, lambda: self.read_output(fd))

    def loop(self) -> None:
        while not self.over():
            timeout = min(self.log.flush() or 60.0, max(0.0, self.kill_at - time.monotonic()))
            timeout = min(timeout, self.lease.turn())
            if self.sweep_since:
                timeout = min(timeout, 0.02)
            for key, _ in self.selector.select(timeout):
                key.data()
            self.reap()
            if time.monotonic() >= self.kill_at:
                self.kill_at = float("inf")
                self.kill()
        self.finish()

    def read_output(self, fd: int) -> bool:
        try:
            data = os.read(fd, READ)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(fd)
            del self.outputs[fd]
            return False
        self.log.feed(self.outputs[fd], data)
        self.ring()
        return True

    def read_reports(self) -> None:
        try:
            lines = (self.report_rest + os.read(self.reports, READ)).split(b"\n")
        except BlockingIOError:
            return
        self.report_rest = lines.pop()
        for line in lines:
            self.reported(json.loads(line))

    def reported(self, report: dict[str, Any]) -> None:
        kind = report.pop("event")
        rank = self.ranks.setdefault(report["rank"], {"local": report["local"]})
        rank.update(
            state=kind,
            **{k: v for k, v in report.items() if k in ("pid", "code", "peak_kb", "error")},
        )
        if kind == "started":
            rank["process"] = processes.look(report["pid"])
            rank["keeper"] = processes.look(report["keeper"])
            if self.why and rank["process"]:
                processes.send(rank["process"], signal.SIGTERM)
        failed = kind == "ended" and report["code"] != 0
        because = self.why or ("torchrun ended" if self.sweep_since else "")
        if failed:
            because = self.look_into(report, because)
        self.event(f"rank_{kind}", **report)
        if failed and not because:
            self.failed(f"rank {report['rank']}", "failed")
        if kind == "ended" and self.asked:
            self.dismiss()

    def failed(self, who: str, how: str) -> None:
        self.lease.pass_on(f"{who} on node {self.run.node} {how}", PEER_GRACE, failed=True)
        self.end(f"{who} {how}", FAILED_GRACE)

    def look_into(self, report: dict[str, Any], because: str) -> str:
        """Add what is known of a rank's failure; by whose will it ended, empty if by its own."""
        stream = str(report["rank"])
        for fd in [fd for fd, name in self.outputs.items() if name == stream]:
            self.read_output(fd)  # its last words may stand in the pipe yet
        rank = self.ranks[report["rank"]]
        error = self.error_of(report["local"]) or rank.get("error")
        said = last_words(self.log.last.get(stream, b"")) if not error or report["code"] < 0 else ""
        if rank.get("gone") or (error and error["time"] < self.end_since):
            because = ""  # before we asked: tearing down took it longer, or its report did
        report.update(self.evidence.now(), error=error, said=said, asked=because)
        return because

    def error_of(self, local: int) -> dict[str, Any] | None:
        try:
            with open(self.run.error(local), encoding="ascii") as file:
                error: dict[str, Any] = json.load(file)
            return error
        except (OSError, ValueError):
            return None

    # -- listeners ---------------------------------------------------------------------------

    def accept(self, server: socket.socket) -> None:
        listener, _ = server.accept()
        listener.setblocking(False)
        self.listeners.append(listener)
        self.watch(listener.fileno(), lambda: self.hear(listener))

    def hear(self, listener: socket.socket) -> None:
        try:
            data = listener.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.lease.head_hung_up(listener.fileno())
            self.selector.unregister(listener.fileno())
            self.listeners.remove(listener)
            listener.close()
            return
        for line in data.splitlines():  # requests are single short lines, sent whole
            request = json.loads(line)
            if "head" in request:
                self.lease.head_says(listener.fileno(), request["head"], request["at"])
            else:
                self.ask(request["why"], request["grace"])

    def ring(self) -> None:
        for listener in self.listeners:
            with contextlib.suppress(OSError):  # full: a bell waits already; gone: hear() notices
                listener.send(b"\n")

    def event(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"event": kind, "time": time.time(), **fields}) + "\n"
        self.unsaid += line.encode()
        with contextlib.suppress(OSError):
            while self.unsaid:
                self.unsaid = self.unsaid[os.write(self.events, self.unsaid) :]
        self.ring()

    # -- the end -----------------------------------------------------------------------------

    def ask(self, why: str, grace: float, **mark: Any) -> None:
        """The end that somebody asked for: each rank may take its time. A mark is told with it."""
        self.lease.pass_on(why, grace, **mark)
        if not self.asked:
            self.asked = True
            with contextlib.suppress(OSError):
                os.close(os.open(self.run.ending, os.O_WRONLY | os.O_CREAT, 0o600))
        self.end(why, grace, **mark)

    def end(self, why: str, grace: float, **mark: Any) -> None:
        """SIGTERM to the ranks, after the grace SIGKILL to what is left. May be called again."""
        first = not self.why
        self.why = self.why or why
        self.end_since = min(self.end_since, time.time())
        self.kill_at = min(self.kill_at, time.monotonic() + grace)
        if not first:
            return
        self.event("ending", why=why, grace=grace, **mark)
        known = [rank for rank in self.ranks.values() if rank.get("process")]
        for rank in known:
            rank["gone"] = not processes.alive(rank["process"])  # though we have not heard of it
            processes.send(rank["process"], signal.SIGTERM)
        if not known and self.agent is not None and self.agent_code is None:
            os.kill(self.agent.pid, signal.SIGTERM)  # not reaped yet, so the PID is still its own

    def dismiss(self) -> None:
        """Once the last rank has ended, torchrun need not learn of it: it would only hurry them."""
        ranks = list(self.ranks.values())
        if all(rank["state"] == "ended" for rank in ranks) and any(rank["code"] for rank in ranks):
            for rank in ranks:
                if rank.get("keeper"):
                    processes.send(rank["keeper"], signal.SIGKILL)
            if self.agent is not None and self.agent_code is None:
                os.kill(self.agent.pid, signal.SIGKILL)

    def kill(self) -> None:
        for process in self.living():
            if processes.send(process, signal.SIGKILL):
                self.killed[process.pid] = process.name

    def living(self) -> list[processes.Process]:
        return processes.of_job(self.run.job, self.run.node, os.getpid())

    def reap(self) -> None:
        """Collect every child that ended: torchrun, and orphans that fell to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.agent is not None and pid == self.agent.pid:
                self.read_reports()  # what was said before is no consequence of this
                self.agent_code = self.agent.returncode = os.waitstatus_to_exitcode(status)
                self.sweep_since = time.monotonic()
                self.kill_at = min(self.kill_at, self.sweep_since + SWEEP_GRACE)
                if self.agent_code and not self.why:
                    words = f"torchrun on node {self.run.node} ended with {self.agent_code}"
                    self.lease.pass_on(words, PEER_GRACE, failed=True)
                for process in self.living():
                    processes.send(process, signal.SIGTERM)
            else:
                self.orphan_ended(pid, os.waitstatus_to_exitcode(status))

    def orphan_ended(self, pid: int, code: int) -> None:
        """A rank whose keeper was killed is a child of ours; how it ended is known all the same."""
        for number, rank in self.ranks.items():
            if rank.get("pid") == pid and rank["state"] != "ended":
                who = {"rank": number, "local": rank["local"], "time": time.time()}
                self.reported({"event": "ended", **who, "pid": pid, "code": code})

    def over(self) -> bool:
        """Once torchrun has ended: is nothing of the job left alive?"""
        if self.agent_code is None:
            return False
        if not self.living():
            return True
        if self.kill_at == float("inf"):
            self.kill()  # something was born while the others were being killed
        return time.monotonic() - self.sweep_since > SWEEP_LIMIT

    def finish(self) -> None:
        self.reap()
        self.read_reports()
        for pid in self.killed:  # its keeper may have been killed before it could report
            self.orphan_ended(pid, -signal.SIGKILL)
        for fd in list(self.outputs):
            while self.read_output(fd):
                pass
        self.log.flush(everything=True)
        shutil.rmtree(self.run.parcel, ignore_errors=True)
        left = [process.pid for process in self.living()]
        ranks = {
            str(n): {k: r.get(k) for k in ("state", "code", "pid")} for n, r in self.ranks.items()
        }
        said = {"agent": self.agent_code, "why": self.why, "ranks": ranks}
        if self.agent_code:
            said.update(self.evidence.now(), said=last_words(self.log.last.get("-", b"")))
        self.event("ended", **said, killed=self.killed, left=left, lost=self.log.lost)
        with contextlib.suppress(OSError):
            os.ftruncate(self.events, os.fstat(self.events).st_size)  # the rest of its room
        self.lease.goodbye()


def reserve(fd: int, size: int) -> None:
    """Room on the disk that only this file can use, where the file system knows how to do that."""
    # FALLOC_FL_KEEP_SIZE, which os.posix_fallocate() lacks
    ctypes.CDLL(None).fallocate(fd, 1, ctypes.c_int64(0), ctypes.c_int64(size))


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def open_fifo(path: str) -> int:
    os.mkfifo(path, 0o600)
    # Read and write, so that it neither blocks here nor ends when one writer closes it.
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        import fcntl

        fcntl.fcntl(fd, F_SETPIPE_SZ, READ)
    except OSError:
        pass  # the user's limit for big pipes is reached: the usual 64 KiB work too
    return fd


def main(job: str, node: str) -> None:
    """Started by the link. One line to stdout once torchrun is on its way: "ready", or why not."""
    supervisor = Supervisor(RunDir(job, int(node)))
    ready = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    try:
        supervisor.start()
    except OSError as error:
        os.write(ready, f"{error}\n".encode())
        supervisor.event(
            "ended", agent=None, why=f"not started: {error}", ranks={}, killed={}, left=[]
        )
        return
    os.write(ready, b"ready\n")
    os.close(ready)
    supervisor.loop()
