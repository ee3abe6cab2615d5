"""Hosts vanish while a job on many connects, starts, runs and stops: verdicts, leftovers, proofs.

    python scripts/bench/vanish.py [--hosts 128] [--rounds 40] [--seed 1] [--minutes 30]   (root)

A round is one job without torch. At a random moment of its phase one to four hosts lose their link
or their power. The messages of the head have to be true at that moment: no verdict names a host
that was there, no receipt calls a host proved where a process of the job lives, no command ends
well that did not do its work. When all hosts are back, a `stop` proves all, and nothing is left
anywhere.
Prints a line for each round; exits with 1 where something was not so.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ground import machine, require_root

from orchestrator.records.experiment import Experiment
from orchestrator.records.outcome import JobVerdict
from tests.clusters.netns import NetnsCluster
from tests.launching import Command, Head

# Seconds of --node-loss-timeout per host, as all share this machine's processors.
LEASE_OF_A_HOST = 0.25
PHASES = ("connect", "start", "run", "stop")
# The most hosts that vanish in a round.
MOST = 4
TAG = "ORCHESTRATOR_JOB="
ADDRESS = re.compile(r"\b10\.77\.\d+\.\d+\b")
NEVER = "it never began there"
# Seconds for a command, on a machine that all hosts share.
PATIENCE = 300.0


@dataclass
class Round:
    """One job, who vanished, and what was not so."""

    phase: str
    # From a host to how it vanishes.
    victims: dict[int, str]
    # Seconds after the phase began.
    moment: float
    said: str = ""  # the verdict
    # Receipts of the first stop.
    proved: int = 0
    unproved: int = 0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        who = ", ".join(f"host{i} ({how})" for i, how in sorted(self.victims.items()))
        end = f"{self.proved} proved, {self.unproved} not" if self.proved + self.unproved else ""
        return (
            f"{self.phase} +{self.moment:.1f} s: {who}: {'; '.join(filter(None, [self.said, end]))}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Let hosts vanish, and look at what is said.")
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="until the last round")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    require_root()
    print(f"seed {options.seed}, {options.hosts} hosts, {machine()}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="orchestrator-vanish-") as name:
        work = Path(name) / "work"
        work.mkdir()
        with NetnsCluster(options.hosts, Path(name) / "cluster") as cluster:
            bench = Bench(cluster, work, random.Random(options.seed))
            while len(rounds) < options.rounds and time.monotonic() < deadline:
                rounds.append(bench.round(PHASES[len(rounds) % len(PHASES)]))
                print(f"{len(rounds)}. {rounds[-1].line()}", flush=True)
                for wrong in rounds[-1].wrong:
                    print(f"   WRONG: {wrong}", flush=True)
    phases = Counter(each.phase for each in rounds)
    bad = sum(bool(each.wrong) for each in rounds)
    print(f"{len(rounds)} rounds ({', '.join(f'{n} {p}' for p, n in phases.items())}): {bad} wrong")
    sys.exit(bool(bad))


class Bench:
    """The hosts, and a head of them."""

    def __init__(self, cluster: NetnsCluster, work: Path, dice: random.Random) -> None:
        self.cluster, self.dice = cluster, dice
        self.head = Head(cluster, work)
        self.patience = max(10, cluster.size // 2)
        self.lease = max(8.0, LEASE_OF_A_HOST * cluster.size)
        # The seconds that each phase took last.
        self.took = dict.fromkeys(PHASES, 1.0)
        self.calm()

    def calm(self) -> None:
        """Launch and stop once without faults, to learn how long each phase takes."""
        began = time.monotonic()
        launch = self.launch()
        launch.wait_for("connected|answered|[Pp]lan|ranks", PATIENCE)
        self.took["connect"] = time.monotonic() - began
        self.running(launch)
        self.took["start"] = time.monotonic() - began - self.took["connect"]
        began = time.monotonic()
        stop = self.head.command("orchestrator", "stop", "--now")
        assert stop.finish(PATIENCE) == 0, stop.text
        self.took["stop"] = time.monotonic() - began
        launch.finish(PATIENCE)

    def launch(self) -> Command:
        return self.head.launch(
            *("--no-torchrun", "--sync", "off", "--grace", "1", "--name", "vanish"),
            *("--node-loss-timeout", f"{self.lease:g}", "--connect-timeout", str(self.patience)),
            *("sleep", "1000"),
        )

    def running(self, launch: Command) -> None:
        """Wait until each host has its part of the job."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and launch.process.poll() is None:
            if all(self.cluster.processes(i, TAG) for i in range(self.cluster.size)):
                return
            time.sleep(0.2)

    def round(self, phase: str) -> Round:
        hosts = self.dice.sample(range(self.cluster.size), self.dice.randint(1, MOST))
        victims = {host: self.dice.choice(["link", "power"]) for host in hosts}
        one = Round(phase, victims, self.dice.uniform(0, self.took[phase]))
        before = len(self.head.experiments)
        launch = self.launch()
        if phase == "start":
            time.sleep(self.took["connect"])
        elif phase in ("run", "stop"):
            self.running(launch)
        stop = self.head.command("orchestrator", "stop", "--now") if phase == "stop" else None
        time.sleep(one.moment)
        for host, how in victims.items():
            self.cluster.cut(host) if how == "link" else self.cluster.power_off(host)
        for command in filter(None, [stop, launch]):
            one.wrong += self.ended(command, phase)
        if len(self.head.experiments) > before:
            one.wrong += self.look(one)
        else:
            one.wrong += self.look_at_screen(one, launch.text)
        for host, how in victims.items():
            self.cluster.restore(host) if how == "link" else self.cluster.power_on(host)
        one.wrong += self.conclude(one, recorded=len(self.head.experiments) > before)
        return one

    def ended(self, command: Command, phase: str) -> Iterator[str]:
        """Wait for a command's end; say what is wrong with it."""
        try:
            code = command.finish(PATIENCE)
        except AssertionError:
            yield f"it did not end in {PATIENCE:.0f} s:\n{command.text[-2000:]}"
            return
        if "Traceback" in command.text:
            yield f"a trace:\n{command.text[-3000:]}"
        if code == 0 and phase != "stop":
            yield f"exit code 0:\n{command.text[-2000:]}"
        if code == 0 and (left := self.left()):
            yield f"exit code 0, and processes are left on {left}:\n{command.text[-2000:]}"

    def left(self) -> list[int]:
        return [i for i in range(self.cluster.size) if self.cluster.processes(i, TAG)]

    def look(self, one: Round) -> Iterator[str]:
        """Compare what was written down with what is so."""
        record = Experiment(self.head.experiment).read_record()
        verdict = record.verdict or JobVerdict()
        one.said = " ".join(filter(None, [record.state, verdict.kind, verdict.node_name]))
        if verdict.node is not None and verdict.node not in one.victims:
            yield f"the verdict names host{verdict.node}: {verdict.message}"
        left = self.left()
        for name, receipt in record.receipts.items():
            host = self.cluster.addresses.index(name)
            one.proved, one.unproved = (
                one.proved + receipt.proved,
                one.unproved + (not receipt.proved),
            )
            if receipt.proved and host in left:
                yield f"host{host} is called proved, and has processes: {receipt}"

    def look_at_screen(self, one: Round, text: str) -> Iterator[str]:
        """Compare what a launch says that wrote nothing down."""
        one.said = "no job was made"
        found = (self.cluster.addresses.index(a) for a in ADDRESS.findall(text))
        if strangers := sorted(set(found) - one.victims.keys()):
            yield f"hosts {strangers} are named:\n{text[-2000:]}"
        if not any(self.cluster.addresses[host] in text for host in one.victims):
            yield f"none who vanished is named:\n{text[-2000:]}"

    def conclude(self, one: Round, *, recorded: bool) -> Iterator[str]:
        """Check that a stop proves the end once all hosts are back, and that nothing is left."""
        if recorded:
            stop = self.head.command("orchestrator", "stop", "--now")
            if stop.finish(PATIENCE) != 0:
                yield f"the last stop did not end well:\n{stop.text[-2000:]}"
            never = [line for line in stop.lines if NEVER in line]
            if hosts := {
                self.cluster.addresses.index(a) for a in ADDRESS.findall("\n".join(never))
            }:
                one.said += f", {len(hosts)} never knew of it"
                if not hosts <= one.victims.keys() or one.phase in ("run", "stop"):
                    yield f"it began on {sorted(hosts)}:\n{stop.text[-2000:]}"
        deadline = time.monotonic() + self.lease + 30
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if left:
            yield f"processes are left on {left}"
            for host in left:
                for pid in self.cluster.processes(host, TAG):
                    self.cluster.kill(host, pid)


if __name__ == "__main__":
    main()
