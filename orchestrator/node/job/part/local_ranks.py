"""Tracks the ranks of one node by their reports, asks them to end, and explains their ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator

from orchestrator.node.job import processes
from orchestrator.node.job.part.job_log import READ_BYTES, RankOutputs
from orchestrator.node.job.part.oom_evidence import GPU_ASSERTS, Evidence, last_words
from orchestrator.node.job.part.part_end import PartEnd
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol import events
from orchestrator.protocol.events import Event, RankEnded, RankError, RankEvent, RankState
from orchestrator.protocol.message import Nonsense, decode_value, parse_object

ENDED_BY_US = (-signal.SIGTERM, -signal.SIGKILL)


class LocalRank:
    """The known state of one rank."""

    def __init__(self, local: int) -> None:
        self.local = local
        self.state = ""
        self.pid: int | None = None
        self.code: int | None = None
        self.error: RankError | None = None
        self.process: Process | None = None
        self.keeper: Process | None = None
        # The exit code that the program chose before it was asked to end.
        self.leaving: int | None = None
        # True if it had ended before the end was requested, even if its report came later.
        self.gone = False
        self.failed = False
        # Why it was killed before memory ran out.
        self.memory = ""
        # True if it had a handler when SIGTERM was sent; None if no SIGTERM was sent.
        self.saves: bool | None = None


class LocalRanks:
    """The ranks of this node that have started, by number."""

    def __init__(
        self,
        run: RunDir,
        end: PartEnd,
        outputs: RankOutputs,
        evidence: Evidence,
        event: Callable[[Event], None],
    ) -> None:
        self.run, self.end, self.outputs = run, end, outputs
        self.evidence, self.event = evidence, event
        self.known: dict[int, LocalRank] = {}
        self.reports = -1
        self.rest = b""

    def all_ended(self, nproc: int) -> bool:
        """Return True if all `nproc` ranks have started and ended."""
        ended = sum(rank.state == "ended" for rank in self.known.values())
        return ended == max(nproc, len(self.known))

    @property
    def pids(self) -> dict[int, int]:
        """Return the PIDs of the running ranks."""
        return {
            number: rank.process.pid
            for number, rank in self.known.items()
            if rank.process and rank.code is None
        }

    @property
    def any_failed(self) -> bool:
        return any(rank.code for rank in self.known.values())

    @property
    def states(self) -> dict[int, RankState]:
        return {
            number: RankState(state=rank.state, code=rank.code, pid=rank.pid)
            for number, rank in self.known.items()
        }

    # -- reports -----------------------------------------------------------------------------

    def read(self) -> Iterator[RankEvent]:
        """Yield what the ranks and their keepers have reported since the last call."""
        try:
            *lines, self.rest = (self.rest + os.read(self.reports, READ_BYTES)).split(b"\n")
        except BlockingIOError:
            return
        for line in lines:
            # Any program of this user can write to the FIFO.
            with contextlib.suppress(Nonsense):
                yield events.event_from_report(parse_object(line))

    def take(self, report: RankEvent) -> RankEnded | None:
        """Write the event of a report; return it if a rank failed by itself."""
        # This report does not change the state of the rank that sends it.
        if isinstance(report, events.RankSlow):
            self.event(report)
            return None
        rank = self.known.setdefault(report.rank, LocalRank(report.local))
        rank.state = report.event[len("rank_") :]
        if isinstance(report, events.RankRaised):
            rank.error = report.error
        elif isinstance(report, events.RankExit) and report.time < self.end.since:
            rank.leaving = exit_code(report.code)
        elif isinstance(report, events.RankStarted):
            self.started(rank, report)
        elif isinstance(report, events.RankFinished) and report.time >= self.end.since:
            report = report.replace(asked=self.end.why)
        if isinstance(report, RankEnded):
            return self.ended(rank, report)
        self.event(report)
        return None

    def started(self, rank: LocalRank, report: events.RankStarted) -> None:
        # torchrun creates this file once it has imported torch; it is reported once.
        with contextlib.suppress(OSError):
            ready = os.stat(self.run.torch_ready).st_mtime
            os.unlink(self.run.torch_ready)
            self.event(events.TorchReady(time=ready))
        rank.pid = report.pid
        rank.process = processes.find_process(report.pid)
        rank.keeper = processes.find_process(report.keeper)
        if self.end.asked:
            self.ask(rank)

    def ended(self, rank: LocalRank, report: RankEnded) -> RankEnded | None:
        cut_short = bool(rank.leaving) and report.code in ENDED_BY_US
        report = report.replace(asked=self.asked_by(rank, report.code))
        if report.code:
            self.outputs.drain(str(report.rank))
            report = self.explain(rank, report)
        rank.pid, rank.code = report.pid, report.code
        rank.failed = bool(report.code and not report.asked and not cut_short)
        self.event(report)
        return report if rank.failed else None

    def asked_by(self, rank: LocalRank, code: int) -> str:
        """Return the reason for which a rank was asked to end, or "" if it had ended before."""
        failed = any(other.failed for other in self.known.values())
        by_torchrun = failed and code == -signal.SIGTERM
        if rank.gone and not by_torchrun:
            return ""
        return self.end.why or ("torchrun ended" if self.end.sweeps else "")

    def explain(self, rank: LocalRank, report: RankEnded) -> RankEnded:
        """Return the report with the facts of a failure, and whether it came before a request."""
        stream = str(report.rank)
        for fd in self.outputs.of(stream):
            # The rank's last output may still be in the pipe.
            self.outputs.read(fd)
        error = self.error_of(report.local) or rank.error
        asked = report.asked
        # The program had chosen its exit code; a signal reached it only during teardown.
        if rank.leaving:
            asked, code = "", report.code
            report = report.replace(code=rank.leaving if code in ENDED_BY_US else code)
        explains = error and error.type != "SystemExit" and GPU_ASSERTS not in error.message
        says_all = explains and report.code >= 0
        last_output = "" if says_all else last_words(self.outputs.log.last.get(stream, b""))
        if error and error.time < self.end.since:
            # The rank failed before the end was requested; its teardown took longer.
            asked = ""
        found = {**self.evidence.now(), "driver": self.evidence.of_driver(report.pid)}
        more = {"error": error, "said": last_output, "asked": asked, "memory": rank.memory}
        return report.replace(**found, **more)

    def error_of(self, local: int) -> RankError | None:
        try:
            with open(self.run.error(local), "rb") as file:
                return decode_value(RankError, parse_object(file.read()))
        except (OSError, Nonsense):
            return None

    # -- their end ---------------------------------------------------------------------------

    def note_gone(self) -> None:
        """Record which ranks have ended by themselves. Called before any is asked to end."""
        for rank in self.known.values():
            rank.gone = rank.process is not None and processes.is_leaving(rank.process)

    def ask_all(self) -> bool:
        """Send each rank SIGTERM once; return True if there are ranks."""
        for rank in self.known.values():
            self.ask(rank)
        return any(rank.process for rank in self.known.values())

    def ask(self, rank: LocalRank) -> None:
        """Send SIGTERM, once: another one would disturb a rank that saves.

        The handler is looked up before the signal, as it may begin by removing itself. That of
        the Trainer does not count: it saves with all ranks together, or not at all.
        """
        if rank.process is None or rank.saves is not None:
            return
        has_trainer = os.path.exists(os.path.join(self.run.path, f"step_{rank.local}"))
        rank.saves = not has_trainer and processes.catches_signal(rank.process.pid, signal.SIGTERM)
        processes.send_signal(rank.process, signal.SIGTERM)

    def running(self, *, saves: bool) -> list[Process]:
        """Return the running ranks that handled SIGTERM, or those that did not."""
        of_kind = (rank for rank in self.known.values() if bool(rank.saves) is saves)
        found = (rank.process for rank in of_kind if rank.state != "ended")
        return [process for process in found if process and processes.is_alive(process)]

    def asked(self) -> set[int]:
        """Return the PIDs of the ranks that have not ended, and of their keepers."""
        open_ranks = (rank for rank in self.known.values() if rank.state != "ended")
        pairs = ((rank.process, rank.keeper) for rank in open_ranks)
        return {process.pid for pair in pairs for process in pair if process}

    def spared(self, living: Iterable[Process]) -> set[int]:
        """Return the PIDs of the ranks that save, their keepers, and their descendants."""
        saving = {process.pid for process in self.running(saves=True)}
        keepers = {
            rank.keeper.pid for rank in self.known.values() if rank.keeper and rank.pid in saving
        }
        below = processes.find_descendants({process.pid: process for process in living}, saving)
        return saving | keepers | below

    def kill_keepers(self) -> None:
        for rank in self.known.values():
            if rank.keeper:
                processes.send_signal(rank.keeper, signal.SIGKILL)


def exit_code(argument: str) -> int:
    """Return the exit code of a program that called sys.exit with this argument; text means 1."""
    try:
        return int(argument) & 0xFF
    except ValueError:
        return 1
