"""Owns one job's processes on one node: starts torchrun, keeps the log, ends and reports them.

Runs in its own session and outlives the SSH connection that started it. It writes `log`, `ranks`
and `events.jsonl` in the run directory and listens on `socket` there. A byte to every listener
means "the files have grown"; a line of JSON from a listener is a request.

This module is the loop: files, signals, timers and processes. The decisions (which action is due,
and when) are in node/job/part/part_end.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.common import files, hiding
from orchestrator.node.job import hang, processes, resume_dir
from orchestrator.node.job.agent_environment import agent_environment
from orchestrator.node.job.job_processes import JobProcesses
from orchestrator.node.job.part.event_file import EventFile, Listeners
from orchestrator.node.job.part.job_log import (
    NO_RANK,
    READ_BYTES,
    JobLog,
    RankOutputs,
    open_fifo,
)
from orchestrator.node.job.part.local_ranks import LocalRanks
from orchestrator.node.job.part.memory import MemoryGuard
from orchestrator.node.job.part.oom_evidence import Evidence, last_words
from orchestrator.node.job.part.part_end import (
    SWEEP_SECONDS,
    Due,
    EndCause,
    PartEnd,
    Phase,
)
from orchestrator.node.job.part.sampling import SamplerProcess
from orchestrator.node.job.processes import Process
from orchestrator.node.job.ranks.agent_start import (
    AgentStart,
    apply_settings,
    limits_with_room,
    prctl,
)
from orchestrator.node.job.run_directory import RunDir, SystemLog, listen_in
from orchestrator.node.peers.lease import Lease
from orchestrator.protocol import events
from orchestrator.protocol.control import HeadState
from orchestrator.protocol.events import EndOrder, Event, RankEnded, RankEvent
from orchestrator.protocol.message import decode_value
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.version import OWN

if TYPE_CHECKING:
    import subprocess

PR_SET_CHILD_SUBREAPER = 36
# The streams of torchrun: while the job runs, and after all ranks of this node have ended well.
AGENT, GOODBYE = NO_RANK, "~"
RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ranks", "rank.py")
SWEEPING_TURN_SECONDS = 0.02


class Supervisor:
    """Runs one node's part of a job from start to end."""

    def __init__(self, run: RunDir, spec: Spec | None = None) -> None:
        self.run = run
        self.spec = spec or run.read_spec()
        secrets = hiding.secrets_of_environment({**os.environ, **self.spec.env}, self.spec.secrets)
        self.system = SystemLog(run.system, secrets=secrets)
        self.log = JobLog(run.log, run.ranks, self.spec.log_before, secrets)
        self.selector = selectors.DefaultSelector()
        self.evidence = Evidence()
        self.events = EventFile(run.events, secrets, self.system)
        self.lease = Lease(self, self.spec)
        self.listeners = Listeners(self, self.system, self.hear)
        self.outputs = RankOutputs(self, self.log, self.stream_of, self.listeners.notify_listeners)
        self.grace = self.spec.grace
        self.end = PartEnd(self.grace)
        self.ranks = LocalRanks(run, self.end, self.outputs, self.evidence, self.event)
        self.agent: subprocess.Popen[bytes] | None = None
        self.agent_code: int | None = None
        self.processes = JobProcesses(run, os.getpid())
        self.limits = processes.own_limits()
        if not self.spec.node and self.spec.nnodes > 1:
            self.limits = limits_with_room(self.limits)
        self.killed: dict[int, str] = {}
        # Name by PID of the processes that lived when the end began.
        self.lived: dict[int, str] = {}
        self.sampler = SamplerProcess(run)
        self.memory = MemoryGuard(self.spec.memory_floor)

    # -- start -------------------------------------------------------------------------------

    def start(self) -> None:
        spec = self.spec
        words = "starts node %d of %d of job %s, attempt %d: %d ranks from %d on, %s start"
        who = (spec.node, spec.nnodes, spec.job, spec.attempt)
        self.system.line(words, *who, spec.nproc, spec.first_rank, spec.start)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        # Node 0's supervisor has a connection to each other one; the ranks keep the login's limit.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.catch_signals()
        for local in range(spec.nproc):
            self.outputs.watch(open_fifo(self.run.fifo(local)), str(spec.first_rank + local))
        self.ranks.reports = open_fifo(self.run.reports)
        self.watch(self.ranks.reports, self.read_reports)
        if (log := self.evidence.log) is not None:
            self.watch(log, lambda: self.read_kernel_log(log))
        # The supervisor must not keep a directory of the user's busy.
        os.chdir(self.run.path)
        self.listeners.listen(listen_in(self.run.path))
        # A stop that comes after this check finds the socket listening.
        if self.run.start_is_forbidden:
            raise OSError(f"job {self.run.job} was stopped before it had started")
        self.start_agent()

    def catch_signals(self) -> None:
        wake, self.wakeup = os.pipe()
        for fd in (wake, self.wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        stop = EndOrder(why="its supervisor was told to stop", grace=self.grace)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: self.ask(stop))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.watch(wake, lambda: os.read(wake, 4096))

    def start_agent(self) -> None:
        """Start torchrun; its output goes to the log."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.outputs.watch(reading, AGENT)
        start = AgentStart(
            command=[*self.spec.command, f"--log-dir={self.run.path}/torchelastic", RANK],
            environment=agent_environment(self.spec, self.run.path, os.environ),
            umask=self.spec.umask,
            limits=self.limits,
            directory=self.run.path,
            supervisor=os.getpid(),
        )
        try:
            self.agent = self.spawn_agent(start, writing)
        finally:
            os.close(writing)
        self.system.line("torchrun is process %d", self.agent.pid)
        self.event(
            events.Started(
                time=time.time(), version=OWN, agent=self.agent.pid, supervisor=os.getpid()
            )
        )

    def spawn_agent(self, start: AgentStart, output: int) -> subprocess.Popen[bytes]:
        # A warm start does not need this import.
        import subprocess

        return subprocess.Popen(
            start["command"],
            env=start["environment"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: apply_settings(start),
        )

    # -- the loop ----------------------------------------------------------------------------

    def watch(self, fd: int, then: Callable[[], Any]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, then)

    def unwatch(self, fd: int) -> None:
        self.selector.unregister(fd)

    def loop(self) -> None:
        while self.end.phase is not Phase.OVER:
            self.turn()
        self.finish()

    def turn(self) -> None:
        waits = (self.outputs.flush(), self.lease.turn(), self.sample(), self.guard_memory())
        sweeping = self.end.phase is Phase.SWEEPING
        due = SWEEPING_TURN_SECONDS if sweeping else self.end.wait(time.monotonic())
        for key, _ in self.selector.select(min(*waits, due)):
            key.data()
        self.reap()
        due_now = self.end.due(time.monotonic())
        if due_now is Due.KILL:
            self.kill()
        elif due_now is Due.SPARE:
            self.kill_all_but_saving()
        if self.end.phase is Phase.SWEEPING:
            self.end.left(alive=bool(self.living()), now=time.monotonic())

    def sample(self) -> float:
        """Start the sampler once it is due; return the seconds until then."""
        reading = None if self.end.sweeps else self.sampler.start()
        if reading is not None:
            self.watch(reading, lambda: self.read_sampler(reading))
        return self.sampler.wait

    def guard_memory(self) -> float:
        """End the rank that grew before memory runs out; return the seconds until the next look."""
        if self.end.asked or any(rank.memory for rank in self.ranks.known.values()):
            return float("inf")
        if runaway := self.memory.look(self.ranks.pids):
            rank, own, why = runaway
            self.system.line("rank %d is %s", rank, why)
            self.ranks.known[rank].memory = why
            for process in own:
                processes.send_signal(process, signal.SIGKILL)
        return max(0.0, self.memory.due - time.monotonic())

    def read_sampler(self, fd: int) -> None:
        """Copy the sampler's messages into the log."""
        data = os.read(fd, READ_BYTES)
        if data:
            self.outputs.note(data)
            return
        self.unwatch(fd)
        os.close(fd)

    def read_kernel_log(self, log: int) -> None:
        """Report a GPU that the driver calls broken: a rank that waits for it may never fail."""
        pids = {process.pid for process in self.living()}
        for line in self.evidence.newly_broken(pids):
            self.event(events.GpuReport(time=time.time(), line=line))
        if self.evidence.log is None:
            self.unwatch(log)

    def stream_of(self, stream: str) -> str:
        """Return the name in the log for a stream's present output."""
        if stream == AGENT:
            # Reports of ranks that ended before this output must be applied first.
            self.read_reports()
            ended_well = self.ranks.all_ended(self.spec.nproc) and not self.ranks.any_failed
            return GOODBYE if ended_well else AGENT
        if not any(name.isdigit() for name in self.log.last):
            self.event(events.FirstOutput(time=time.time()))
        return stream

    def hear(self, message: EndOrder | HeadState) -> None:
        if isinstance(message, HeadState):
            self.lease.followed = True
        else:
            self.ask(message)

    def event(self, event: Event) -> None:
        self.events.write(event)
        self.listeners.notify_listeners()

    # -- ranks -------------------------------------------------------------------------------

    def read_reports(self) -> None:
        for report in self.ranks.read():
            self.reported(report)

    def reported(self, report: RankEvent) -> None:
        failed = self.ranks.take(report)
        # During an end, the failure changes nothing and the grace continues.
        if failed is not None and not self.end.asked:
            # A failure elsewhere never sends SIGKILL to a rank, so this one is the cause.
            certain = failed.code == -signal.SIGKILL
            why = f"rank {failed.rank} on node {self.spec.node} failed"
            late = hang.waited_in_vain(failed)
            more = {"failed": True, "certain": certain, "late": late}
            order = EndOrder(why=why, grace=self.grace, **more)
            self.lease.pass_on(order)
            self.take_order(order.replace(why=f"rank {failed.rank} failed"), EndCause.RANK)
        if isinstance(report, RankEnded):
            self.dismiss()

    def dismiss(self) -> None:
        """Kill torchrun once the last rank has ended during an end.

        torchrun would only kill ranks that still save, and delay a result that is already known.
        """
        # If a rank of this node failed, torchrun may not have forked the others yet.
        wanted = self.spec.nproc if self.end.cause is EndCause.RANK else 0
        if self.end.asked and self.ranks.any_failed and self.ranks.all_ended(wanted):
            self.ranks.kill_keepers()
            self.signal_agent(signal.SIGKILL)

    # -- the end -----------------------------------------------------------------------------

    def ask(self, order: EndOrder) -> None:
        """End the job by the order of a user, a head or another node."""
        self.system.line("is asked to end: %s; grace %g s", order.why, order.grace)
        self.read_reports()
        self.lease.pass_on(order)
        self.take_order(order, EndCause.ORDER)

    def take_order(self, order: EndOrder, cause: EndCause) -> None:
        """Send SIGTERM to the ranks; those left after the grace are killed. May be called again."""
        if not self.end.asked:
            # A torchrun that has ended by now did so by itself.
            self.reap()
        first = not self.end.asked
        begins = self.end.order(order, cause, time.monotonic(), time.time())
        if not first:
            return
        # Keepers wait while this file exists: torchrun would kill the other ranks.
        with contextlib.suppress(OSError):
            os.close(os.open(self.run.ending, os.O_WRONLY | os.O_CREAT, 0o600))
        # A head's order says no more than that; its own comes after that of the failed rank's node.
        late = order.late or (self.lease.order is not None and self.lease.order.late)
        stuck = hang.late_ranks(self.run) if late else None
        self.event(events.Ending(time=time.time(), stuck=stuck, **vars(order)))
        # The receipt needs this list; a failure must be passed on without delay.
        if not order.failed:
            self.lived = {process.pid: process.name for process in self.living()}
        if begins:
            self.ranks.note_gone()
            if not self.ranks.ask_all():
                self.signal_agent(signal.SIGTERM)

    def signal_agent(self, number: signal.Signals) -> None:
        """Send torchrun a signal unless it is reaped: until then the PID cannot be reused."""
        if self.agent is not None and self.agent.returncode is None:
            os.kill(self.agent.pid, number)

    def kill(self) -> None:
        living = self.living()
        self.system.line("kills %d processes: %s", len(living), [one.pid for one in living])
        self.killed.update(self.processes.kill(living))
        # The time is read again, as finding the processes may take long.
        self.end.killed(time.monotonic())

    def kill_all_but_saving(self) -> None:
        """Kill processes without their own SIGTERM handler; torchrun stays while ranks save."""
        living = self.living()
        spared = self.ranks.spared(living)
        if not spared:
            self.kill()
            return
        deaf = living if self.end.sweeps else self.ranks.running(saves=False)
        doomed = (process for process in deaf if process.pid not in spared)
        self.killed.update(self.processes.kill_some(doomed))
        self.end.spared(time.monotonic())

    def living(self) -> list[Process]:
        return self.processes.living()

    def reap(self) -> None:
        """Reap every child that ended: torchrun, and orphans inherited as subreaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self.agent is not None and pid == self.agent.pid:
                self.agent_ended(self.agent, code)
            else:
                self.orphan_ended(pid, code)

    def agent_ended(self, agent: subprocess.Popen[bytes], code: int) -> None:
        agent.returncode = code
        self.system.line("torchrun has ended with %d", code)
        # Reports written before this are not consequences of torchrun's end.
        self.read_reports()
        self.agent_code = code
        if self.end.agent_ended(code):
            # A killed torchrun does not mean that its ranks ended before it.
            if code > 0:
                self.ranks.note_gone()
            self.lease.pass_on(
                EndOrder(
                    why=f"torchrun on node {self.spec.node} ended with {code}",
                    grace=self.grace,
                    failed=True,
                )
            )
        self.sweep()

    def sweep(self) -> None:
        """End the processes left here once torchrun has ended."""
        self.end.sweep(time.monotonic())
        left = self.living()
        self.system.line("ends what torchrun left: %s", [one.pid for one in left])
        self.ranks.ask_all()
        # A keeper would pass SIGTERM on to its rank, which has already received it.
        asked = self.ranks.asked()
        for process in left:
            if process.pid not in asked:
                processes.send_signal(process, signal.SIGTERM)

    def orphan_ended(self, pid: int, code: int) -> None:
        """Report the end of a rank whose keeper was killed: it is then a child of this process."""
        # The keeper may have reported it just before.
        self.read_reports()
        for number, rank in list(self.ranks.known.items()):
            if rank.pid == pid and rank.state != "ended":
                who = {"rank": number, "local": rank.local, "pid": pid, "code": code}
                self.reported(decode_value(RankEnded, {**who, "time": time.time()}))

    def release(self) -> None:
        """Release the job's GPUs unless it may be restarted or a process still lives."""
        ended_well = not self.end.why and not self.agent_code
        for_good = not self.spec.restarts or (ended_well and self.spec.nnodes == 1)
        if self.spec.claim and for_good and not self.living():
            files.unlock_inherited(os.path.join(os.path.dirname(self.spec.claim), "locks"))

    def finish(self) -> None:
        self.release()
        self.sampler.end()
        self.reap()
        self.read_reports()
        # The keeper may have been killed before it could report.
        for pid in self.killed:
            self.orphan_ended(pid, -signal.SIGKILL)
        self.outputs.drain()
        self.log.flush(everything=True)
        # Another attempt may need it.
        if not self.spec.restarts:
            shutil.rmtree(self.run.payload, ignore_errors=True)
        # The reports just read may have requested the end.
        self.lease.wake(time.monotonic())
        ended_well = not self.end.why and not self.agent_code
        # Processes that the sampler had started die with it, which may take a moment.
        left = [] if self.processes.wait(SWEEP_SECONDS) else self.living()
        if self.spec.restarts and ended_well:
            resume_dir.remove_resume_dir(self.run)
        self.event(self.last_event(left))
        self.events.release_room()
        self.lease.goodbye()

    def last_event(self, left: list[Process]) -> events.Ended:
        more: dict[str, Any] = {}
        if self.agent_code:
            more = {
                **self.evidence.now(),
                "said": last_words(self.log.last.get(AGENT, b"") + self.log.last.get(GOODBYE, b"")),
            }
        return events.Ended(
            time=time.time(),
            agent=self.agent_code,
            why="" if self.end.cause is EndCause.AGENT else self.end.why,
            ranks=self.ranks.states,
            killed=self.killed,
            left=tuple(process.pid for process in left),
            shared_memory=self.processes.segments.remove(),
            lived=self.lived or None,
            lost=self.log.lost,
            stood_still=self.lease.stood_still,
            **more,
        )


def main(
    job: str, part: str, attempt: str, make: Callable[[RunDir], Supervisor] = Supervisor
) -> None:
    """Run a job in this process; its standard output is read by the server alone."""
    ready = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    run_job(make(RunDir(job, int(part), int(attempt))), ready)


def run_job(supervisor: Supervisor, ready: int) -> None:
    """Run a job. Write one line once torchrun was started: "ready", or why it was not."""
    try:
        supervisor.start()
        os.write(ready, b"ready\n")
    # ValueError means a NUL in a variable.
    except (OSError, ValueError) as error:
        reason = processes.error_in_words(error)
        os.write(ready, f"{reason}\n".encode())
        why, now = f"not started: {reason}", time.time()
        supervisor.event(events.Ended(time=now, agent=None, why=why, ranks={}, killed={}, left=()))
        return
    finally:
        os.close(ready)
    supervisor.loop()
