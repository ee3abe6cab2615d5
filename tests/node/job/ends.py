"""Random ends of one node's part of a job: a kind of leftover, a way to end; is the proof true?

Supervisor, keeper, rank and stop are the real ones, torchrun is the tests' stand-in.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.node.follow import stop_job
from orchestrator.node.job import processes
from orchestrator.protocol.requests.follow import Stop, StopReceipt
from tests.node.job import leftovers
from tests.node.running import Job, no_group

PROGRAM = leftovers.__file__
READY_SECONDS = 60.0
CONTAINED = 0.25  # of the jobs are in control groups of their own, where that can be
WAYS = (
    *("stop", "stop_now", "two_stops", "at_once", "by_itself"),
    *("kill_rank", "kill_agent", "kill_random"),
    *("kill_supervisor", "kill_supervisor_and_rank", "kill_all_known", "kill_with_look"),
    *("freeze_supervisor", "freeze_and_continue", "freeze_and_kill"),
)


@dataclass(frozen=True)
class Round:
    """One end, and what was said and what was true afterwards."""

    number: int
    kind: str
    way: str
    receipt: StopReceipt
    alive: dict[int, str]  # PID -> command line, of what lives of the job
    seconds: float

    @property
    def proved(self) -> bool:
        receipt = self.receipt
        return receipt.known and not receipt.left and not receipt.doubtful

    @property
    def is_false(self) -> bool:
        return self.proved and bool(self.alive)

    @property
    def in_words(self) -> str:
        if self.proved:
            said = "nothing left"
        else:
            said = f"left {list(self.receipt.left)}, in doubt {self.receipt.doubtful}"
        flag = "FALSE PROOF" if self.is_false else "ok"
        return (
            f"{self.number} {flag}: {self.kind}, {self.way}: {said};"
            f" alive: {self.alive or 'nothing'}; {self.seconds:.1f} s"
        )


class Ending:
    """A job that leaves one kind of leftover and is ended one way."""

    def __init__(self, home: Path, number: int, kind: str, way: str, chance: random.Random) -> None:
        self.number, self.kind, self.way, self.chance = number, kind, way, chance
        self.mark = home / f"mark-{os.getpid()}-{number}-{time.monotonic_ns()}"
        self.mark.touch()
        self.contained = chance.random() < CONTAINED
        self.job = Job(home, f"ends-{os.getpid()}-{number}-{time.monotonic_ns()}")

    def play(self) -> Round:
        target = {"kind": "script", "name": PROGRAM, "args": [self.kind, str(self.mark)]}
        start = self.chance.choice(["plain", "fork"])
        spec = self.job.spec(target, start=start, nproc=self.chance.choice([1, 1, 2]))
        with contextlib.nullcontext() if self.contained else no_group(self.job):
            self.job.start(spec)
        try:
            if self.way != "at_once":
                self.until_ready()
            self.pause(0.4)
            self.hurt()
            self.pause(0.3)
            began = time.monotonic()
            receipt = self.stopped()
            took = time.monotonic() - began
            time.sleep(0.5)
            way = f"{self.way}{' in a group' if self.contained else ''}"
            return Round(self.number, self.kind, way, receipt, self.alive(), took)
        finally:
            self.clear()

    def pause(self, most: float) -> None:
        time.sleep(self.chance.uniform(0, most))

    def until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        assert self.job.supervisor is not None
        while self.job.supervisor.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if b"ready " in Path(self.job.run.log).read_bytes():
                    return
            time.sleep(0.02)

    # -- what befalls it ---------------------------------------------------------------------

    def hurt(self) -> None:
        assert self.job.supervisor is not None
        supervisor = self.job.supervisor.pid
        of_job = [pid for pid in self.alive() if pid != supervisor]
        ranks = [
            pid for pid in of_job if PROGRAM in command(pid) and "torchrun" not in command(pid)
        ]
        agents = [pid for pid in of_job if "torchrun.py" in command(pid)]
        if self.way == "kill_rank":
            kill(ranks[:1])
        elif self.way == "kill_agent":
            kill(agents[:1])
        elif self.way == "kill_random":
            kill(self.chance.sample(of_job, min(1, len(of_job))))
        elif self.way == "kill_supervisor":
            kill([supervisor])
        elif self.way == "kill_supervisor_and_rank":
            kill([supervisor, *ranks])
        elif self.way == "kill_all_known":
            kill([supervisor, *agents, *ranks])
        elif self.way == "kill_with_look":  # after the supervisor has looked once more
            time.sleep(1.2)
            kill([supervisor, *ranks])
        elif self.way == "by_itself":
            time.sleep(1.0)
        elif self.way.startswith("freeze"):
            kill([supervisor], signal.SIGSTOP)
            self.pause(0.5)
        if self.way == "freeze_and_kill":
            kill([*ranks, supervisor])
        elif self.way == "freeze_and_continue":
            threading.Timer(0.7, kill, ([supervisor], signal.SIGCONT)).start()
        threading.Thread(target=self.job.supervisor.wait, daemon=True).start()

    def stopped(self) -> StopReceipt:
        grace = 0.0 if self.way == "stop_now" else self.chance.choice([0.2, 0.6])
        wait = grace + (0.5 if self.way == "freeze_supervisor" else 2.5)  # it does not answer
        order = Stop(job=self.job.run.job, node=0, why="test", grace=grace, wait=wait)
        if self.way != "two_stops":
            return stop_job.stop(self.job.run, order)
        other = threading.Thread(target=stop_job.stop, args=(self.job.run, order))
        other.start()
        try:
            return stop_job.stop(self.job.run, order)
        finally:
            other.join()

    # -- the truth ---------------------------------------------------------------------------

    def alive(self) -> dict[int, str]:
        """Look three times: what forks anew all the time may be missed by one look."""
        words = (os.fsencode(self.mark), os.fsencode(self.job.run.job))
        there: dict[int, str] = {}
        for _ in range(3):
            for pid in processes.everyone():
                line = processes.contents(f"/proc/{pid}/cmdline")
                line += processes.contents(f"/proc/{pid}/environ")
                process = processes.find(pid) if any(word in line for word in words) else None
                if process is not None and not process.is_dead and pid != os.getpid():
                    there[pid] = command(pid)[:60]
        return there

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self.mark.unlink()  # what forks anew all the time ends by itself
        deadline = time.monotonic() + 10.0
        while (left := self.alive()) and time.monotonic() < deadline:
            kill(list(left))
        self.job.clear()


def command(pid: int) -> str:
    return " ".join(processes.words_of(pid))


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def random_end(home: Path, seed: int, kind: str | None = None, way: str | None = None) -> Round:
    """Play one random end: the seed says all that chance decides here."""
    chance = random.Random(seed)
    chosen = chance.choice(list(leftovers.KINDS)), chance.choice(WAYS)
    return Ending(home, seed, kind or chosen[0], way or chosen[1], chance).play()
