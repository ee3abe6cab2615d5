"""Owns one job's processes on one node: starts torchrun, keeps the log, ends all, reports how.

Runs in its own session and outlives the SSH connection that started it. It writes `log`, `ranks`
and `events.jsonl` in the run directory and listens on `socket` there: a byte to every listener
means "there is something new in the files", a line of JSON from a listener is a request.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import termios
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.common import files, hiding
from orchestrator.common.program import path_with
from orchestrator.node.job import processes, register, resume_dir
from orchestrator.node.job.job_log import NO_RANK, JobLog
from orchestrator.node.job.job_processes import JobProcesses
from orchestrator.node.job.oom_evidence import GPU_ASSERTS, Evidence, last_words
from orchestrator.node.job.ranks.agent_start import AgentStart, limits, prctl, settle, with_room
from orchestrator.node.job.ranks.node_command import NodeCommand
from orchestrator.node.job.run_directory import RunDir, SystemLog, listen_in
from orchestrator.node.job.sampling import SamplerProcess
from orchestrator.node.peers.lease import Lease
from orchestrator.protocol import control, events
from orchestrator.protocol.control import HeadNews
from orchestrator.protocol.events import (
    EPILOG,
    PROLOG,
    EndOrder,
    Event,
    RankEnded,
    RankError,
    RankEvent,
)
from orchestrator.protocol.message import Nonsense, decode, parse
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.timing import PEER_GRACE
from orchestrator.protocol.version import OWN

PR_SET_CHILD_SUBREAPER = 36
F_SETPIPE_SZ = 1031
READ_BYTES = 1 << 20
MOST_READS = 64  # of an output, where more may come than can be read
# The streams of torchrun: while the job runs, and after all ranks of this node have ended well.
AGENT, GOODBYE = NO_RANK, "~"
COMMAND = "prolog"  # its output is shown as torchrun's, and the epilog's, too
SHELL = "/bin/sh"
ENDED_BY_US = (-signal.SIGTERM, -signal.SIGKILL)
RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ranks", "rank.py")
FAILED_GRACE_SECONDS = 1.0  # after a rank failed, in which its siblings may still say why
SWEEP_GRACE_SECONDS = 0.5  # what outlives torchrun gets this long between SIGTERM and SIGKILL
EVENTS_ROOM_BYTES = 1 << 18  # a job's last word must find room when its log has filled the disk
TOLD = ("rank", "pid", "code", "agent", "name", "how", "why")  # of an event, in its line
STOP_ORDER = EndOrder(why="its supervisor was told to stop", grace=10.0)
SWEEP_LIMIT_SECONDS = 10.0  # a process that survives SIGKILL this long hangs in the kernel


class RankProcess:
    """A rank, as far as it is known here."""

    def __init__(self, local: int) -> None:
        self.local = local
        self.state = ""
        self.pid: int | None = None
        self.code: int | None = None
        self.error: RankError | None = None
        self.process: processes.Process | None = None
        self.keeper: processes.Process | None = None
        self.leaving: int | None = None  # the exit code that it chose, before we asked
        self.gone = False  # it had ended when the end was asked for, though we had not heard of it


class Supervisor:
    """Runs one node's part of a job from start to end."""

    def __init__(self, run: RunDir, spec: Spec | None = None) -> None:
        self.run = run
        self.spec = spec or run.read_spec()
        env = {**os.environ, **self.spec.env}
        self.secrets = hiding.of_environment(env, self.spec.secrets)
        self.system = SystemLog(run.system, secrets=self.secrets)
        before = self.spec.attempt.log if self.spec.attempt else 0
        self.log = JobLog(run.log, run.ranks, before, self.secrets)
        self.evidence = Evidence()
        self.events = os.open(run.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        reserve(self.events, EVENTS_ROOM_BYTES)
        self.unwritten = b""  # what a full disk refused of the events
        self.selector = selectors.DefaultSelector()
        self.outputs: dict[int, str] = {}  # file descriptor -> stream
        self.listeners: list[socket.socket] = []
        self.agent: subprocess.Popen[bytes] | None = None
        self.agent_code: int | None = None
        self.command: NodeCommand | None = None  # the prolog or the epilog, while it runs
        self.ranks: dict[int, RankProcess] = {}
        self.report_rest = b""
        self.spoken = False  # a rank has printed something
        self.asked = False
        self.agent_failed = False  # by itself: nobody had asked it to end
        self.rank_failed = False  # here, so that torchrun ends the other ranks of this node
        self.why = ""  # why it is being ended; empty while it just runs
        self.end_since = float("inf")  # Unix time
        self.kill_at = float("inf")
        self.sweep_since = 0.0
        self.swept_since = float("inf")  # when all that lived then was killed
        self.processes = JobProcesses(run.job, run.node, os.getpid())
        self.register = register.Register(run)
        self.limits = limits()  # of the login
        if not self.spec.node:
            self.limits = with_room(self.limits, self.spec.nnodes, self.spec.nproc)
        self.killed: dict[int, str] = {}
        self.lived: dict[int, str] = {}  # PID -> name: when its end began
        self.outlived: dict[int, str] = {}  # PID -> name: torchrun,
        self.left_behind: dict[int, str] = {}  # and had to be ended
        self.lease = Lease(self, self.spec)
        self.sampler = SamplerProcess(run)

    # -- start -------------------------------------------------------------------------------

    def start(self) -> None:
        spec, number = self.spec, self.spec.attempt.number if self.spec.attempt else 1
        words = "starts node %d of %d of job %s, attempt %d: %d ranks from %d on, %s start"
        who = (self.run.node, spec.nnodes, self.run.job, number)
        self.system.line(words, *who, spec.nproc, spec.first_rank, spec.start)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        # Node 0's has a connection to each of the others; the ranks keep the login's limit.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        wake, self.wakeup = os.pipe()
        for fd in (wake, self.wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: self.ask(STOP_ORDER))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.watch(wake, lambda: os.read(wake, 4096))
        for local in range(self.spec.nproc):
            stream = str(self.spec.first_rank + local)
            self.watch_output(open_fifo(self.run.fifo(local)), stream)
        self.reports = open_fifo(self.run.reports)
        self.watch(self.reports, self.read_reports)
        if (log := self.evidence.log) is not None:
            self.watch(log, lambda: self.read_kernel_log(log))
        self.listen()
        if self.run.start_is_forbidden:  # whoever stops it later finds us listening
            raise Forbidden(f"job {self.run.job} was stopped before it had started")
        self.register.group = self.processes.group = register.make_group(self.run)
        self.register.check()  # there is one as soon as there is anything to be found
        if self.spec.prolog:
            self.run_command(PROLOG, self.spec.prolog)
        else:
            self.start_agent()

    def start_agent(self) -> None:
        command = [*self.spec.command, f"--log-dir={self.run.path}/torchelastic", RANK]
        self.agent = self.with_output(self.spawn_agent, command, self.run.path, AGENT)
        self.system.line("torchrun is process %d", self.agent.pid)
        if not self.spec.prolog:
            self.say_started(self.agent.pid)

    def say_started(self, pid: int) -> None:
        pids = {"agent": pid, "supervisor": os.getpid()}
        self.event(events.Started(time=time.time(), version=OWN, **pids))

    def with_output(
        self,
        spawn: Callable[[AgentStart, int], subprocess.Popen[bytes]],
        command: list[str],
        directory: str,
        stream: str,
    ) -> subprocess.Popen[bytes]:
        """Start a process of the job whose output goes into the log."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.watch_output(reading, stream)
        start = AgentStart(
            command=command,
            environment=agent_environment(self.spec, self.run.path, os.environ),
            umask=self.spec.umask,
            limits=self.limits,
            directory=directory,
            supervisor=os.getpid(),
            group=self.register.group,
        )
        try:
            return spawn(start, writing)
        finally:
            os.close(writing)

    def spawn_agent(self, start: AgentStart, output: int) -> subprocess.Popen[bytes]:
        return spawn(start, output)

    # -- the user's commands -----------------------------------------------------------------

    def run_command(self, name: str, text: str) -> None:
        """Run the prolog or the epilog; both may take as long."""
        self.drain()
        here = self.spec.workdir if os.path.isdir(self.spec.workdir) else self.run.path
        before = self.log.last.pop(AGENT, b"")
        process = self.with_output(spawn, [SHELL, "-c", text], here, COMMAND)
        limit = self.spec.prolog_timeout
        self.system.line("the %s is process %d, for %g s at most", name, process.pid, limit)
        self.kill_at = time.monotonic() + limit
        self.command = NodeCommand(name, process, self.kill_at, limit, before)
        if name == PROLOG:
            self.say_started(process.pid)

    def command_ended(self, code: int) -> None:
        """Start torchrun after the prolog. A failed epilog is only reported: the job is over."""
        assert self.command is not None
        command, self.command = self.command, None
        self.system.line("the %s has ended with %d", command.name, code)
        command.process.returncode = code
        self.drain()
        how, said = command.failure(code), last_words(self.log.last.pop(AGENT, b""))
        self.log.last[AGENT] = command.before
        if how and (command.name == EPILOG or not self.why):
            self.event(
                events.CommandFailed(time=time.time(), name=command.name, how=how, said=said)
            )
        if command.name == EPILOG:
            self.kill_at = float("inf")  # what it left running is killed
        elif self.why:
            self.sweep()
        elif how:
            self.prolog_failed(how)
        else:
            self.kill_at = float("inf")
            try:
                self.start_agent()
            except (OSError, ValueError) as error:
                self.prolog_failed(f"torchrun cannot be started: {processes.in_words(error)}")

    def prolog_failed(self, how: str) -> None:
        why = f"the prolog on node {self.run.node} {how}"
        order = EndOrder(why=why, grace=PEER_GRACE, failed=True, certain=True)
        self.lease.pass_on(order)
        self.end(order)
        self.sweep()

    def listen(self) -> None:
        os.chdir(self.run.path)  # and hold no directory of the user's
        server = listen_in(self.run.path)
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
        self.turn_until_over()
        if self.spec.epilog:
            self.swept_since = float("inf")
            try:
                self.run_command(EPILOG, self.spec.epilog)
            except (OSError, ValueError) as error:  # ValueError: a NUL in it
                how = f"cannot be started: {processes.in_words(error)}"
                self.event(events.CommandFailed(time=time.time(), name=EPILOG, how=how))
            self.turn_until_over()
        self.finish()

    def turn_until_over(self) -> None:
        while not self.over():
            timeout = min(self.flush_log(), max(0.0, self.kill_at - time.monotonic()))
            timeout = min(timeout, self.lease.turn(), self.sample(), self.register.turn())
            if self.sweep_since:
                timeout = min(timeout, 0.02)
            for key, _ in self.selector.select(timeout):
                key.data()
            self.reap()
            if time.monotonic() >= self.kill_at:
                self.kill_at = float("inf")
                self.kill()

    def sample(self) -> float:
        """Have this machine sampled once the job runs; return the seconds until then."""
        reading = None if self.sweep_since else self.sampler.start()
        if reading is not None:
            self.watch(reading, lambda: self.hear_sampler(reading))
        return self.sampler.wait

    def hear_sampler(self, fd: int) -> None:
        """Write what the sampler says into the log."""
        data = os.read(fd, READ_BYTES)
        if data:
            self.log.note(data)
            self.ring()
            return
        self.unwatch(fd)
        os.close(fd)
        if not self.sweep_since and self.sampler.errors:
            words = f"orchestrator: no more metrics of this node: {self.sampler.err}\n"
            self.log.note(words.encode("utf-8", "replace"))
            self.ring()

    def flush_log(self) -> float:
        """Write unfinished lines that are due; return the seconds until the next one is."""
        before = self.log.size
        due = self.log.flush()
        if self.log.size > before:
            self.ring()
        return 60.0 if due is None else due

    def read_output(self, fd: int) -> bool:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(fd)
            del self.outputs[fd]
            return False
        stream = self.outputs[fd]
        if stream == AGENT:
            self.read_reports()  # it may speak of ranks whose ends were reported before
            stream = GOODBYE if self.ranks_ended_well() else AGENT
        elif stream == COMMAND:
            stream = AGENT
        elif not self.spoken:
            self.spoken = True
            self.event(events.FirstOutput(time=time.time()))
        if self.log.feed(stream, data):
            self.ring()
        return True

    def drain(self, stream: str = "") -> None:
        """Read what was printed so far, or by one rank; what is left running may print for ever."""
        for fd in [fd for fd, name in self.outputs.items() if stream in ("", name)]:
            for _ in range(MOST_READS):
                if not has_bytes(fd) or not self.read_output(fd):
                    break

    def ranks_ended_well(self) -> bool:
        ended = [rank for rank in self.ranks.values() if rank.state == "ended"]
        return len(ended) == self.spec.nproc and not any(rank.code for rank in ended)

    def read_reports(self) -> None:
        try:
            lines = (self.report_rest + os.read(self.reports, READ_BYTES)).split(b"\n")
        except BlockingIOError:
            return
        self.report_rest = lines.pop()
        self.register.due = 0.0  # there is a rank more, or what one has left
        for line in lines:
            with contextlib.suppress(Nonsense):  # any program of this user can write there
                self.reported(events.from_report(parse(line)))

    def reported(self, report: RankEvent) -> None:
        if isinstance(report, events.RankSlow):  # says nothing of the state of the rank that tells
            self.event(report)
            return
        rank = self.ranks.setdefault(report.rank, RankProcess(report.local))
        rank.state = report.event[len("rank_") :]
        if isinstance(report, events.RankRaised):
            rank.error = report.error
        elif isinstance(report, events.RankExit) and report.time < self.end_since:
            rank.leaving = exit_code(report.code)
        elif isinstance(report, events.RankStarted):
            self.note_torch()
            rank.pid = report.pid
            rank.process = processes.find(report.pid)
            rank.keeper = processes.find(report.keeper)
            if self.why and rank.process:
                processes.send(rank.process, signal.SIGTERM)
        elif isinstance(report, events.RankFinished) and report.time >= self.end_since:
            report = report.replace(asked=self.why)
        if isinstance(report, RankEnded):
            self.rank_ended(rank, report)
        else:
            self.event(report)

    def read_kernel_log(self, log: int) -> None:
        """Tell of a GPU that its driver calls broken: what waits for it may never fail."""
        pids = {process.pid for process in self.living()}
        for line in self.evidence.newly_broken(pids):
            self.event(events.GpuReport(time=time.time(), line=line))
        if self.evidence.log is None:
            self.unwatch(log)

    def note_torch(self) -> None:
        """Report once when torchrun had imported torch, if it left a note of that."""
        with contextlib.suppress(OSError):
            ready = os.stat(self.run.torch_ready).st_mtime
            os.unlink(self.run.torch_ready)
            self.event(events.TorchReady(time=ready))

    def rank_ended(self, rank: RankProcess, report: RankEnded) -> None:
        cut_short = bool(rank.leaving) and report.code in ENDED_BY_US
        report = report.replace(asked=self.asked_by(rank, report.code))
        if report.code:
            self.drain(str(report.rank))
            report = self.explain(rank, report)
        rank.pid, rank.code = report.pid, report.code
        self.event(report)
        if report.code and not report.asked and not cut_short:
            self.failed(report)
        if self.why:
            self.dismiss()

    def failed(self, report: RankEnded) -> None:
        reason = f"rank {report.rank} on node {self.run.node} failed"
        certain = report.code == -signal.SIGKILL  # no failure elsewhere does that to a rank
        order = EndOrder(why=reason, grace=PEER_GRACE, failed=True, certain=certain)
        self.lease.pass_on(order)
        self.rank_failed = True
        self.end(order.replace(why=f"rank {report.rank} failed", grace=FAILED_GRACE_SECONDS))

    def asked_by(self, rank: RankProcess, code: int) -> str:
        """Say who asked a rank to end; nothing where it had ended before, however late we hear."""
        by_torchrun = self.rank_failed and code == -signal.SIGTERM
        if rank.gone and not by_torchrun:
            return ""
        return self.why or ("torchrun ended" if self.sweep_since else "")

    def explain(self, rank: RankProcess, report: RankEnded) -> RankEnded:
        """Add what is known of a rank's failure, and whether it had failed before it was asked."""
        stream = str(report.rank)
        for fd in [fd for fd, name in self.outputs.items() if name == stream]:
            self.read_output(fd)  # its last output may still be in the pipe
        error = self.error_of(report.local) or rank.error
        asked = report.asked
        if rank.leaving:  # and was signalled only while it tore down
            asked, code = "", report.code
            report = report.replace(code=rank.leaving if code in ENDED_BY_US else code)
        says_all = error and report.code >= 0 and GPU_ASSERTS not in error.message
        last_output = "" if says_all else last_words(self.log.last.get(stream, b""))
        if error and error.time < self.end_since:
            asked = ""  # tearing down took it longer
        found = {**self.evidence.now(), "driver": self.evidence.of_driver(report.pid)}
        return report.replace(**found, error=error, said=last_output, asked=asked)

    def error_of(self, local: int) -> RankError | None:
        try:
            with open(self.run.error(local), "rb") as file:
                return decode(RankError, parse(file.read()))
        except (OSError, Nonsense):
            return None

    # -- listeners ---------------------------------------------------------------------------

    def accept(self, server: socket.socket) -> None:
        try:
            listener, _ = server.accept()
        except OSError:  # it left again, or too many files are open
            return
        self.system.line("a server connects")
        listener.setblocking(False)
        self.listeners.append(listener)
        self.watch(listener.fileno(), lambda: self.hear(listener))
        with contextlib.suppress(OSError):  # it may have looked at the files before it was known
            listener.send(b"\n")

    def hear(self, listener: socket.socket) -> None:
        try:
            data = listener.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.system.line("a server hangs up")
            self.lease.head_hung_up(listener.fileno())
            self.selector.unregister(listener.fileno())
            self.listeners.remove(listener)
            listener.close()
            return
        for line in data.splitlines():  # requests are single short lines, sent whole
            try:
                message = control.from_line(line)
            except Nonsense:
                continue
            if isinstance(message, HeadNews):
                self.lease.head_says(listener.fileno(), message)
            else:
                self.ask(message)

    def ring(self) -> None:
        for listener in self.listeners:
            with contextlib.suppress(OSError):  # full: a bell waits already; gone: hear() notices
                listener.send(b"\n")

    def event(self, event: Event) -> None:
        data = hiding.hide(events.to_data(event), self.secrets)
        told = (f"{name}={data[name]}" for name in TOLD if data.get(name) not in (None, ""))
        self.system.line("event %s", " ".join([str(data["event"]), *told]))
        self.unwritten += json.dumps(data).encode("ascii") + b"\n"
        with contextlib.suppress(OSError):
            while self.unwritten:
                self.unwritten = self.unwritten[os.write(self.events, self.unwritten) :]
        self.ring()

    # -- the end -----------------------------------------------------------------------------

    def ask(self, order: EndOrder) -> None:
        """End the job because somebody asked for it: each rank may take its time."""
        self.system.line("is asked to end: %s; grace %g s", order.why, order.grace)
        self.read_reports()  # of ranks that were asked through torchrun, too, it would be twice
        self.lease.pass_on(order)
        if not self.asked:
            self.asked = True
            with contextlib.suppress(OSError):
                os.close(os.open(self.run.ending, os.O_WRONLY | os.O_CREAT, 0o600))
        self.end(order)

    def end(self, order: EndOrder) -> None:
        """Send SIGTERM to the ranks, after the grace SIGKILL to what is left. May be repeated."""
        if not self.why:
            self.reap()  # a torchrun that has ended by now did so by itself
        first = not self.why
        self.why = self.why or order.why
        self.end_since = min(self.end_since, time.time())
        if self.command is None or self.command.name == PROLOG or not order.grace:
            self.kill_at = min(self.kill_at, time.monotonic() + order.grace)
        if not first:
            return
        self.event(events.Ending(time=time.time(), **vars(order)))
        if not order.failed:  # for the receipt; a failure must be passed on at once
            self.lived = {process.pid: process.name for process in self.living()}
        self.note_gone()
        known = [rank for rank in self.ranks.values() if rank.process]
        for rank in known:
            assert rank.process is not None
            processes.send(rank.process, signal.SIGTERM)
        if not known:
            self.signal_agent(signal.SIGTERM)

    def note_gone(self) -> None:
        """Note which ranks have ended by themselves: before anybody here ends them."""
        for rank in () if self.sweep_since else self.ranks.values():
            rank.gone = rank.process is not None and processes.is_leaving(rank.process)

    def signal_agent(self, number: signal.Signals) -> None:
        """Send torchrun a signal, if it is not reaped yet: so long the PID is its own.

        Before it starts, the prolog gets the signal, with all that it has started.
        """
        if self.command is not None and self.command.name == PROLOG:
            os.killpg(self.command.process.pid, number)
        elif self.agent is not None and self.agent.returncode is None:
            os.kill(self.agent.pid, number)

    def dismiss(self) -> None:
        """Kill torchrun once the last rank has ended.

        It would only hurry what still saves, and take its time to say what is known already.
        """
        ranks = list(self.ranks.values())
        if not self.asked and len(ranks) < self.spec.nproc:
            return  # it still forks some
        if all(rank.state == "ended" for rank in ranks) and any(rank.code for rank in ranks):
            for rank in ranks:
                if rank.keeper:
                    processes.send(rank.keeper, signal.SIGKILL)
            self.signal_agent(signal.SIGKILL)

    def kill(self) -> None:
        living = self.living()
        self.system.line("kills %d processes: %s", len(living), [one.pid for one in living])
        self.killed.update(self.processes.kill(living))
        if self.sweep_since:  # looking for it may have taken long
            self.swept_since = min(self.swept_since, time.monotonic())

    def living(self) -> list[processes.Process]:
        return self.processes.living()

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
                self.agent.returncode = os.waitstatus_to_exitcode(status)
                self.system.line("torchrun has ended with %d", self.agent.returncode)
                self.read_reports()  # what was said before is no consequence of this
                self.agent_code = self.agent.returncode
                if self.agent_code > 0 and not self.why:  # it ended by itself, and none with it
                    self.note_gone()
                if self.agent_code and not self.why:
                    self.agent_failed = True
                    reason = f"torchrun on node {self.run.node} ended with {self.agent_code}"
                    self.lease.pass_on(EndOrder(why=reason, grace=PEER_GRACE, failed=True))
                self.sweep()
            elif self.command is not None and pid == self.command.process.pid:
                self.command_ended(os.waitstatus_to_exitcode(status))
            else:
                self.orphan_ended(pid, os.waitstatus_to_exitcode(status))

    def sweep(self) -> None:
        """End what is left of the job here, after its torchrun or its prolog."""
        self.sweep_since = time.monotonic()
        self.kill_at = min(self.kill_at, self.sweep_since + SWEEP_GRACE_SECONDS)
        left = self.living()
        self.system.line("ends what torchrun left: %s", [one.pid for one in left])
        self.outlived = {process.pid: process.name for process in left}
        for process in left:
            processes.send(process, signal.SIGTERM)

    def orphan_ended(self, pid: int, code: int) -> None:
        """Report the end of a rank whose keeper was killed: it is a child of ours since then.

        Also note what ranks had left running after themselves, if it did not end by itself.
        """
        if pid in self.outlived and code in (-signal.SIGTERM, -signal.SIGKILL):
            self.left_behind[pid] = self.outlived[pid]
        self.read_reports()  # the keeper may have told it just before
        for number, rank in self.ranks.items():
            if rank.pid == pid and rank.state != "ended":
                who = {"rank": number, "local": rank.local, "pid": pid, "code": code}
                self.reported(decode(RankEnded, {**who, "time": time.time()}))

    def over(self) -> bool:
        """Has torchrun ended, or the command beside it, and is nothing of the job left alive?"""
        if self.command is not None or not self.sweep_since:
            return False
        if not self.living():
            return True
        if self.kill_at == float("inf"):
            self.kill()  # something was born while the others were being killed
        return time.monotonic() - self.swept_since > SWEEP_LIMIT_SECONDS

    def release(self) -> None:
        """Let others have what the job held, unless it may be started again, or something lives."""
        ended_well = not self.why and not self.agent_code
        for_good = self.spec.attempt is None or (ended_well and self.spec.nnodes == 1)
        if self.spec.claim and for_good and not self.living():
            files.unlock_inherited(os.path.join(os.path.dirname(self.spec.claim), "locks"))

    def finish(self) -> None:
        self.release()
        self.sampler.end()
        self.reap()
        self.read_reports()
        for pid in self.killed:  # its keeper may have been killed before it could report
            self.orphan_ended(pid, -signal.SIGKILL)
        self.drain()
        self.log.flush(everything=True)
        if self.spec.attempt is None:  # else another attempt may need it
            shutil.rmtree(self.run.parcel, ignore_errors=True)
        self.lease.wake(time.monotonic())  # what was read just now may have been the end
        more: dict[str, Any] = {}
        if self.agent_code:
            output = self.log.last.get(AGENT, b"") + self.log.last.get(GOODBYE, b"")
            more = {**self.evidence.now(), "said": last_words(output)}
        # What the sampler had started dies with it, and may take a moment.
        left = [] if self.processes.wait(SWEEP_GRACE_SECONDS) else self.living()
        ended = events.Ended(
            time=time.time(),
            agent=self.agent_code,
            why="" if self.agent_failed else self.why,
            ranks={
                number: events.RankState(state=rank.state, code=rank.code, pid=rank.pid)
                for number, rank in self.ranks.items()
            },
            killed=self.killed,
            left=tuple(process.pid for process in left),
            lived=self.lived or None,
            left_behind=None if self.why or self.agent_code else self.left_behind or None,
            lost=self.log.lost,
            stood_still=self.lease.stood_still,
            **more,
        )
        if self.spec.attempt is not None and not self.why and not self.agent_code:
            resume_dir.remove(self.run)  # it ended well
        if not ended.left:
            register.remove(self.run, self.register.group)
        self.event(ended)
        with contextlib.suppress(OSError):
            os.ftruncate(self.events, os.fstat(self.events).st_size)  # the rest of its room
        self.lease.goodbye()


def has_bytes(fd: int) -> bool:
    """Tell whether there is something to read; the end of all writers is no such thing."""
    return fcntl.ioctl(fd, termios.FIONREAD, bytes(4)) != bytes(4)


def exit_code(argument: str) -> int:
    """Return the exit code of a program that called sys.exit with this; words are an error."""
    try:
        return int(argument) & 0xFF
    except ValueError:
        return 1


class Forbidden(OSError):
    """Raised for a job that was stopped before it had started."""


def reserve(fd: int, size: int) -> None:
    """Reserve room on the disk for this file alone, where the file system can do that."""
    # FALLOC_FL_KEEP_SIZE, which os.posix_fallocate() lacks
    ctypes.CDLL(None).fallocate(fd, 1, ctypes.c_int64(0), ctypes.c_int64(size))


def spawn(start: AgentStart, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        start["command"],
        env=start["environment"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=lambda: settle(start),  # noqa: PLW1509  no threads
    )


def agent_environment(spec: Spec, run: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of torchrun, and so of the ranks, in a login with this `environ`."""
    env = {**environ, **spec.env, "ORCHESTRATOR_RUN": run}
    env["PATH"] = path_with(spec.agent[0], env.get("PATH", os.defpath))
    if env.get("PYTHONPATH"):  # torchrun starts elsewhere: `.` and `src` mean the workdir
        entries = env["PYTHONPATH"].split(os.pathsep)
        places = (os.path.join(spec.workdir, entry) if entry else spec.workdir for entry in entries)
        env["PYTHONPATH"] = os.pathsep.join(places)
    for name in spec.unset:
        env.pop(name, None)
    return env


def open_fifo(path: str) -> int:
    with files.making_sockets():
        os.mkfifo(path, 0o600)
    # Read and write, so that it neither blocks here nor ends when one writer closes it.
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(OSError):  # the user's limit for big pipes: the usual 64 KiB work too
        fcntl.fcntl(fd, F_SETPIPE_SZ, READ_BYTES)
    return fd


def main(job: str, node: str, make: Callable[[RunDir], Supervisor] = Supervisor) -> None:
    """Run a job in this process; what it says on standard output goes to the server alone."""
    ready = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    run_job(make(RunDir(job, int(node))), ready)


def run_job(supervisor: Supervisor, ready: int) -> None:
    """Run a job. Write one line once torchrun is on its way: "ready", or why not."""
    try:
        supervisor.start()
        os.write(ready, b"ready\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in a variable
        reason = processes.in_words(error)
        os.write(ready, f"{reason}\n".encode())
        why, now = f"not started: {reason}", time.time()
        supervisor.event(events.Ended(time=now, agent=None, why=why, ranks={}, killed={}, left=()))
        return
    finally:
        os.close(ready)
    supervisor.loop()
