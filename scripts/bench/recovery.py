"""Seeded faults over the engine, a Trainer and a plain DDP script, on disks of their own.

    python scripts/bench/recovery.py [--faults 200] [--seed 1] [--out FILE]      (root)

Three nodes train and one stands by, each with a home, a launch directory, memory and processes of
its own. Faults come one after the other, some into the recovery from another. Each has to be
recovered from or rightly given up, with the right node named; the losses of each step are those of
the program undisturbed, to the bit, and no line or metric is missing at home. One line for each
fault and for each end of a job; exits with 1 where something was not so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path

from ground import require_root
from recovery_faults import (
    ASLEEP,
    CLOCKS,
    FAULTS,
    HANG,
    LAST,
    LEASE,
    SHARED_MEMORY_MB,
    VANISHES,
    Seam,
    UnderFire,
)
from recovery_programs import PROGRAMS, Program

from tests.clusters.netns import NetnsCluster

NODES, STEPS, FAULTS_OF_A_JOB = 3, 240, 6
# Seconds of a step while faults come.
PACE_SECONDS = 0.25
# The least number of steps between two faults.
GAP_STEPS = 4
# No fault comes in the last steps.
LAST_STEPS = 20
# Seconds until the next good step.
FAULT_LIMIT_SECONDS = 150.0
END_LIMIT_SECONDS = 240.0
# The head waits 5 s for nodes that have no part in the end.
RELEASE_LIMIT_SECONDS = 60.0
# Steps that a machine may have measured since it was last asked, two seconds ago.
UNSENT_STEPS = 16
CLOCK = Path(__file__).with_name("clock.c")
UNMADE = (OSError, KeyError, ValueError, IndexError, subprocess.TimeoutExpired)
STEP = re.compile(r"^step (\d+) loss (\S+) rank (\d+)$", re.MULTILINE)

# From (rank, step) to the loss as it is printed.
Losses = dict[tuple[int, int], str]


@dataclass
class Blow:
    """One fault, and what came of it."""

    program: str
    kind: str
    where: str = ""
    step: int = 0
    # The last step before the next attempt.
    until: int = 0
    victims: list[int] = field(default_factory=list)
    seconds: float = 0.0
    # The attempts that ended by the fault.
    attempts: int = 0
    verdicts: list[str] = field(default_factory=list)
    # How many verdicts of these attempts name a victim.
    blamed: int = 0
    wrong: str = ""


@dataclass
class End:
    """One job, once it is over."""

    program: str
    faults: list[str]
    state: str = ""
    attempts: int = 0
    # The number of losses that were compared, of all ranks.
    steps: int = 0
    # Pairs of (rank, step): see `excuses`.
    unsent: list[tuple[int, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description="Do harm to jobs, and see how they go on.")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--kinds", help="only these, separated by commas")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="until the last job")
    parser.add_argument("--out", type=Path, help="where each result is appended as JSON")
    parser.add_argument(
        "--clocks", action="store_true", help="let the clocks of nodes jump as well"
    )
    parser.add_argument("--shared", action="store_true", help="nodes and head share a disk")
    options = parser.parse_args()
    if options.clocks:
        FAULTS.update(CLOCKS)
    require_root()
    chance = random.Random(options.seed)
    kinds = order(chance, options.faults, options.kinds.split(",") if options.kinds else None)
    deadline = time.monotonic() + 60 * options.minutes
    blows: list[Blow] = []
    ends: list[End] = []
    with hosts(clocks=options.clocks, shared=options.shared) as (cluster, base):
        bench = Bench(cluster, base, options.out)
        turn = 0
        while kinds and time.monotonic() < deadline:
            name = options.programs.split(",")[turn % len(options.programs.split(","))]
            turn += 1
            trial = Trial(bench, name, chance.randrange(1 << 30), next_job(kinds))
            ends.append(trial.run())
            blows += trial.blows
            kinds = [*trial.left, *kinds]
    print(summary(blows, ends, options.seed))
    sys.exit(any([one.wrong for one in blows] + [one.wrong for one in ends]))


def order(chance: random.Random, count: int, only: Sequence[str] | None) -> list[str]:
    """Return so many kinds in a random order, each as often as the others or once more."""
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += chance.sample(only or [*FAULTS], len(only or FAULTS))
    return chosen[:count]


def next_job(kinds: list[str]) -> list[str]:
    """Return the faults of the next job: one that no other can follow ends the list."""
    taken: list[str] = []
    while kinds and len(taken) < FAULTS_OF_A_JOB:
        taken.append(kinds.pop(0))
        if taken[-1] in LAST:
            break
    return taken


@contextlib.contextmanager
def hosts(*, clocks: bool, shared: bool) -> Iterator[tuple[NetnsCluster, Path]]:
    """Create the hosts; the head's own directory is hidden from them."""
    with tempfile.TemporaryDirectory(prefix="orchestrator-recovery-") as name:
        base = Path(name)
        for part in ("work", "control"):
            (base / part).mkdir()
        os.environ["ORCHESTRATOR_HOME"] = str(base / "login")
        disks = [Path.home()] if shared else [base / "work", Path.home()]
        cluster = NetnsCluster(NODES + 1, base / "cluster", tmpfs=disks, tmpfs_size="96m")
        if clocks:
            made = ["cc", "-shared", "-fPIC", "-o", str(base / "clock.so"), str(CLOCK), "-ldl"]
            subprocess.run(made, check=True)
            cluster.environment["LD_PRELOAD"] = made[4]
        with cluster:
            for host in range(NODES + 1):
                size = f"remount,size={SHARED_MEMORY_MB}m"
                cluster.exec(host, ["mount", "-o", size, "/dev/shm"])
            yield cluster, base


class Bench:
    """The hosts, and what the programs compute when nothing happens to them."""

    def __init__(self, cluster: NetnsCluster, base: Path, out: Path | None) -> None:
        self.cluster, self.base, self.out = cluster, base, out
        self.jobs = 0
        self.references: dict[tuple[str, tuple[int, int] | None], Undisturbed] = {}

    def undisturbed(self, name: str, poisoned: tuple[int, int] | None) -> Undisturbed:
        """Return what a program computes without faults, but for a loss that is NaN."""
        if (name, poisoned) not in self.references:
            trial = Trial(self, name, 0, [])
            trial.poisoned = poisoned
            self.references[name, poisoned] = trial.reference()
        return self.references[name, poisoned]

    def report(self, result: Blow | End) -> None:
        load = round(os.getloadavg()[0], 1)
        print(line_of(result), f"(load {load})", flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps({"load": load, **asdict(result)}) + "\n")


@dataclass(frozen=True)
class Undisturbed:
    losses: Losses
    metrics: Losses
    weights: tuple[str, ...]


class Trial(UnderFire):
    """One job, the faults that come to it, and what is left of it."""

    def __init__(self, bench: Bench, name: str, seed: int, kinds: list[str]) -> None:
        bench.jobs += 1
        self.number = f"{bench.jobs:03d}"
        super().__init__(bench.cluster, bench.base / "work" / self.number, seed, NODES)
        self.bench, self.name, self.left = bench, name, [*kinds]
        self.control = bench.base / "control" / self.number
        self.control.mkdir()
        self.head.directory.mkdir()
        *nodes, spare = self.cluster.addresses
        self.head.node_list = self.cluster.write_list([*nodes, f"{spare} spare"], "spare.txt")
        for file, text in self.program.files.items():
            self.head.script(file, text)
        self.blows: list[Blow] = []
        self.before_next = 0

    @property
    def program(self) -> Program:
        return PROGRAMS[self.name]

    @cached_property
    def outputs(self) -> Path:
        return self.head.experiment / "outputs"

    def launch(self, pace: float) -> None:
        self.pace(pace)
        options = ["--nproc", "1", "--max-restarts", "40", "--quiet", "--connect-timeout", "5"]
        options += ["--node-loss-timeout", f"{LEASE:g}", "--hang-timeout", f"{HANG:g}"]
        options += ["--name", f"{self.name}-{self.number}"]
        options += ["--env", f"RECOVERY_CONTROL={self.control}"]
        self.command = self.head.launch(*options, *self.program.words(STEPS))

    def pace(self, seconds: float) -> None:
        new = self.control / "pace.new"
        new.write_text(str(seconds))
        new.replace(self.control / "pace")

    @property
    def step(self) -> int:  # type: ignore[override]
        """Return the last step that any rank has taken."""
        steps = [step for rank in range(NODES) for step, _ in self.said(rank)[-1:]]
        return max(steps, default=0)

    def said(self, rank: int) -> list[tuple[int, str]]:
        """Return the steps and losses that a rank noted, without a half-written line."""
        try:
            text = (self.control / f"said_{rank}").read_text()
        except FileNotFoundError:
            return []
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [(int(step), loss) for step, loss in map(str.split, lines)]

    # -- one job -----------------------------------------------------------------------------

    def reference(self) -> Undisturbed:
        if self.poisoned is not None:
            rank, step = self.poisoned
            what = {"what": "nan", "step": step, "always": False}
            (self.control / f"do_{rank}").write_text(json.dumps(what))
        self.launch(0.0)
        if self.command.finish(END_LIMIT_SECONDS):
            raise Seam(f"it failed without a fault:\n{self.command.text}")
        losses = {(rank, step): loss for rank in range(NODES) for step, loss in self.said(rank)}
        return Undisturbed(losses, self.metrics(), self.weights())

    def run(self) -> End:
        reference = self.bench.undisturbed(self.name, None)
        end = End(self.name, [])
        self.launch(PACE_SECONDS)
        try:
            self.until(lambda: self.step >= GAP_STEPS, "its first steps", END_LIMIT_SECONDS)
            while self.left and self.step < STEPS - LAST_STEPS and not self.over:
                self.suffer(self.left.pop(0))
                if not self.over:
                    self.await_step(self.step + self.chance.randint(1, GAP_STEPS))
            self.finish(end)
        except (Seam, AssertionError) as error:
            end.wrong.append(str(error)[-1500:])
        finally:
            self.repair()
        if self.head.experiments:
            end.state, end.attempts = self.head.record["state"], self.attempts
            failed = [one for one in self.head.record["attempts"] if one["state"] != "done"]
            if unexplained := len(failed) - sum(blow.attempts for blow in self.blows):
                why = [
                    (one["number"], one["verdict"] and one["verdict"]["message"]) for one in failed
                ]
                end.wrong.append(f"{unexplained} attempts ended between the faults, of {why}")
        end.faults = [blow.kind for blow in self.blows]
        if end.state == "done":
            if self.poisoned is not None:
                reference = self.bench.undisturbed(self.name, self.poisoned)
            end.wrong += self.compare(reference, end)
        end.wrong += self.left_on_hosts()
        if end.wrong or any(blow.wrong for blow in self.blows):
            self.keep()
        if end.state in ("lost", "killed", "running", "restarting") or end.wrong:
            self.clean()
        self.bench.report(end)
        return end

    @property
    def over(self) -> bool:
        if self.command.process.poll() is None:
            return False
        return self.head.record["state"] in ("done", "failed", "lost", "stopped")

    def finish(self, end: End) -> None:
        if not self.over:
            self.pace(0.0)
        code = self.command.finish(END_LIMIT_SECONDS)
        rightly = self.always and self.head.record["state"] == "failed"
        rightly = rightly and self.blows[-1].attempts == 2
        if code and not rightly:
            end.wrong.append(f"it ended with {code}:\n{self.command.text[-1200:]}")
        ours = [line for line in self.command.lines if not line.startswith("node")]
        if any("Traceback" in line for line in ours):
            end.wrong.append(f"a trace on the screen: {ours[-12:]}")

    # -- one fault ---------------------------------------------------------------------------

    def suffer(self, kind: str) -> None:
        """Cause a fault, wait until the training has passed it, and repair the damage."""
        blow = Blow(self.name, kind, step=self.step)
        self.blows.append(blow)
        self.until(lambda: self.head.record["state"] == "running", "a job that runs")
        names = [node["name"] for node in self.head.record["nodes"]]
        before, began = self.attempts, time.monotonic()
        self.victims.clear()
        self.before_next = blow.step
        try:
            blow.where = FAULTS[kind](self)
            if self.victims:
                self.await_end_of_attempt(before)
            if not self.always and not self.over:
                self.await_step(max(blow.step, self.before_next if self.victims else self.step) + 2)
        except (Seam, AssertionError) as error:
            blow.wrong = str(error)[-1500:]
        except UNMADE as error:
            # The fault could not be caused, so the job is not at fault.
            blow.wrong = f"the fault could not be made: {error!r}"
        blow.victims, blow.until = sorted({*self.victims}), max(blow.step, self.before_next)
        self.judge(blow, before, names)
        self.repair()
        blow.seconds = round(time.monotonic() - began, 1)
        self.bench.report(blow)
        if blow.wrong and not self.over:
            self.await_step(self.step + 1)

    def await_end_of_attempt(self, before: int) -> None:
        self.until(
            lambda: self.attempts > before + self.always or self.over,
            "the end of the attempt",
            FAULT_LIMIT_SECONDS,
        )
        self.before_next = self.step

    def await_step(self, step: int) -> None:
        what = f"step {min(step, STEPS)}"
        self.until(lambda: self.step >= min(step, STEPS) or self.over, what, FAULT_LIMIT_SECONDS)

    def judge(self, blow: Blow, before: int, names: list[str]) -> None:
        """Find the attempts that ended by the fault, and the nodes that their verdicts name."""
        ended = self.head.record["attempts"][before:]
        blow.attempts = len(ended)
        expected = {names[node] for node in self.victims}
        for attempt in ended:
            verdict = attempt["verdict"] or {}
            who = verdict.get("node_name") or "no node"
            blow.verdicts.append(f"{verdict.get('kind')} on {who}: {verdict.get('message')}"[:200])
            vain = verdict.get("kind") == "start" and "head killed" in blow.kind
            # A start that died with its head can name no victim.
            blow.blamed += who in expected or vain
        if blow.wrong:
            return
        if self.over and self.head.record["state"] != "done" and not self.always:
            blow.wrong = f"the job was given up: {self.command.text[-800:]}"
        elif ended and not expected:
            blow.wrong = "an attempt ended by what should have passed"
        elif blow.blamed < len(ended):
            blow.wrong = f"the verdict names none of {sorted(expected)}"

    # -- what is left ------------------------------------------------------------------------

    def metrics(self) -> Losses:
        """Return the losses that the head received: the last line of each step."""
        losses: Losses = {}
        for rank in range(NODES if self.program.measures else 0):
            path = self.head.experiment / f"outputs/rank_{rank:02d}_metrics.jsonl"
            text = path.read_text() if path.exists() else ""
            for line in text.splitlines():
                try:
                    if "loss" in (known := json.loads(line)):
                        losses[rank, known["step"]] = repr(known["loss"])
                except ValueError:
                    losses[rank, -1] = f"{line} of {path.name}"
        return losses

    def weights(self) -> tuple[str, ...]:
        return tuple(path.read_text() for path in sorted(self.control.glob("weights_*")))

    def compare(self, reference: Undisturbed, end: End) -> Iterator[str]:
        """Yield what differs from the program undisturbed, or is missing at home."""
        said = Counter((rank, *line) for rank in range(NODES) for line in self.said(rank))
        end.steps = len(reference.losses)
        odd = {
            (r, s): (v, reference.losses.get((r, s)))
            for r, s, v in said
            if reference.losses.get((r, s)) != v
        }
        if odd:
            yield f"{len(odd)} losses differ: {dict(sorted(odd.items())[:4])}"
        taken = {(rank, step) for rank, step, _ in said}
        missing = reference.losses.keys() - taken
        untold = {key for key in missing if self.died_before_it_told(*key, taken)}
        end.unsent += sorted(untold)
        if missing := missing - untold:
            yield f"{len(missing)} steps were never taken: {sorted(missing)[:6]}"
        if self.weights() != reference.weights:
            yield "the weights differ"
        printed = Counter(self.printed())
        lost, doubled = said - printed, printed - said
        for rank, step, loss in [*lost]:
            if self.excuses(rank, step):
                end.unsent.append((rank, step))
                del lost[rank, step, loss]
        if lost:
            yield f"{lost.total()} lines lost: {sorted(lost)[:6]}"
        # A line may be printed and not be noted.
        if doubled - Counter(set(doubled)):
            yield f"lines doubled: {sorted(doubled)[:6]}"
        here = self.metrics()
        gone = reference.metrics.keys() - here.keys()
        end.unsent += sorted(key for key in gone if self.excuses(*key))
        gone -= {*end.unsent}
        if gone:
            yield f"{len(gone)} metrics lost: {sorted(gone)[:8]}"
        wrong = [key for key in here if here[key] != reference.metrics.get(key)]
        if wrong:
            first = [(key, here[key]) for key in sorted(wrong)[:4]]
            yield f"{len(wrong)} metrics differ: {first}"

    def died_before_it_told(self, rank: int, step: int, taken: set[tuple[int, int]]) -> bool:
        """Return True if a rank was killed after its part of a step, before it could print it.

        Another rank has printed that step, which is possible only once all ranks have done their
        part.
        """
        shared = any((other, step) in taken for other in range(NODES) if other != rank)
        killed = any(rank in b.victims and b.step <= step <= b.until + 1 for b in self.blows)
        return self.program.tells_last and shared and killed

    def excuses(self, rank: int, step: int) -> bool:
        """Return True if a fault explains the loss: a machine vanished, or a rank was killed."""
        for former, blow in zip([None, *self.blows], self.blows, strict=False):
            before = UNSENT_STEPS if VANISHES.search(blow.kind) else 1
            if former is not None and former.kind == ASLEEP and before > 1:
                # The head had not asked for metrics since that fault.
                before += blow.step - former.step
            if rank in blow.victims and blow.step - before <= step <= blow.until + 1:
                return True
        return False

    def printed(self) -> Iterator[tuple[int, int, str]]:
        """Return the lines of all steps in the logs on the head."""
        for path in (self.head.experiment / "logs").glob("node_*.txt"):
            for step, loss, rank in STEP.findall(path.read_text(errors="replace")):
                yield int(rank), int(step), loss

    def left_on_hosts(self) -> Iterator[str]:
        if not self.head.nothing_left():
            yield f"processes are left: {[self.head.left(host) for host in range(NODES + 1)]}"
        until = time.monotonic() + RELEASE_LIMIT_SECONDS
        for host in range(NODES + 1):
            while waiting := self.cluster.processes(host, "ORCHESTRATOR_ROOM="):
                if time.monotonic() > until:
                    break
                time.sleep(0.5)
            if waiting:
                yield f"host {host}: {len(waiting)} processes wait for a job that is over"
            words = "ls -d /dev/shm/orchestrator-*/*/* ~/.orchestrator/resume/*/* 2>/dev/null; true"
            if states := self.cluster.exec(host, ["sh", "-c", words], 240).split():
                yield f"host {host}: states are left: {states}"

    def keep(self) -> None:
        """Copy the files of a job that went wrong to the results."""
        if self.bench.out is None:
            return
        place = self.bench.out.with_suffix("") / self.number
        leave = shutil.ignore_patterns("checkpoints", "*.pt", "filler", "programs")
        copy = partial(shutil.copytree, ignore=leave, symlinks=True, ignore_dangling_symlinks=True)
        with contextlib.suppress(OSError, shutil.Error):
            copy(self.head.directory, place / "head")
        (place / "screen.txt").write_text(self.command.text)
        for host in range(NODES + 1):
            runs = self.cluster.path(host, f"{self.cluster.home_path}/.orchestrator/runs")
            with contextlib.suppress(OSError, shutil.Error):
                copy(runs, place / f"host_{host}")

    def clean(self) -> None:
        """Restore the hosts for the next job."""
        with contextlib.suppress(AssertionError):
            self.head.command("orchestrator", "stop", "--now").finish(30.0)
        self.command.process.kill()
        for host in range(NODES + 1):
            self.cluster.power_off(host)
            self.cluster.power_on(host)


# -- the results ----------------------------------------------------------------------------------


def line_of(result: Blow | End) -> str:
    if isinstance(result, End):
        words = f"END {result.program}: {result.state}, {result.attempts} attempts"
        return f"{words}, {result.steps} losses compared; {'; '.join(result.wrong) or 'all right'}"
    words = f"{result.program}: {result.kind} ({result.where}) at step {result.step}"
    words += f", {result.seconds:.1f} s, {result.attempts} attempts, blame {result.blamed}"
    return f"{words}; {result.wrong or 'right'} {result.verdicts}"


def summary(blows: Sequence[Blow], ends: Sequence[End], seed: int) -> str:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for blow in blows:
        row = counts[blow.kind]
        for place, value in enumerate((1, not blow.wrong, blow.attempts, blow.blamed)):
            row[place] += value
    lines = [f"{'fault':38} came  right  attempts ended  right node named"]
    for kind, (came, right, ended, blamed) in sorted(counts.items()):
        lines.append(f"{kind:38} {came:4} {right:6} {ended:15} {blamed:17}")
    right = sum(not blow.wrong for blow in blows)
    lines.append(f"seed {seed}: {right} of {len(blows)} faults as they should be")
    for name in PROGRAMS:
        own = [end for end in ends if end.program == name]
        whole = [end for end in own if not end.wrong]
        words = f"{len(whole)} of {len(own)} jobs as they should be at their end"
        unsent = sum(len(end.unsent) for end in own)
        words += f", {sum(end.steps for end in whole)} losses to the bit"
        lines.append(f"{name}: {words}, {unsent} lines or metrics went with a machine or a rank")
        lines += [f"  {'; '.join(end.faults)}: {'; '.join(end.wrong)}" for end in own if end.wrong]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
