"""Random faults on a real cluster, and what must be true after all of them.

One round is one job: faults fall on its hosts and its head at random moments, all is repaired, and
a user who types no more than `attach` and `stop` must find everything in order. The seed decides
which faults come when; the machine's own timing does not repeat, so a seed is a hint, not a replay.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clusters.netns import NetnsCluster
from tests.launching import Command, Head

LEASE = 8.0  # --node-loss-timeout
# Seconds for anything to end by itself once all is repaired.
LIMIT = 90.0
CODES = {0, 1, 4, 130}
TAG = "ORCHESTRATOR_JOB="
# Numbered lines; a child that left its session and its environment; stays long, or ends badly.
PROGRAM = """
import os, signal, subprocess, sys, time
seconds, how, rank = float(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "stubborn" else save)
subprocess.Popen(["env", "-i", "setsid", "sleep", "1000"])
end, n = time.monotonic() + seconds, 0
while time.monotonic() < end:
    sys.stdout.write("".join(f"line {rank} {n + i} " + "x" * 60 + "\\n" for i in range(20)))
    sys.stdout.flush()
    n += 20
    time.sleep(0.02)
if how == "fails" and rank == 1:
    raise ValueError("it was told to")
"""
BYSTANDER = 'exec -a "torchrun train.py master_launch orchestrator" sleep 100000'


@dataclass
class Broken:
    """An invariant that did not hold."""

    round: int
    seed: int
    faults: list[str]
    what: str


@dataclass
class Chaos:
    """A cluster on which rounds are run; `with Chaos(cluster, directory, seed) as chaos: ...`."""

    cluster: NetnsCluster
    directory: Path
    seed: int
    rounds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)

    def __enter__(self) -> Chaos:
        self.random = random.Random(self.seed)
        self.head = Head(self.cluster, self.directory)
        self.head.script("chaotic.py", PROGRAM)
        self.experiments = self.directory / "experiments"
        self.experiments.mkdir()
        # Its own small disk, which fills up; and the hosts do not share it.
        small = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(self.experiments)]
        subprocess.run(small, check=True)
        hosts = range(self.cluster.size)
        self.bystanders = [self.cluster.popen(i, ["bash", "-c", BYSTANDER]) for i in hosts]
        return self

    def __exit__(self, *_: object) -> None:
        for bystander in self.bystanders:
            bystander.kill()
            bystander.wait()
        subprocess.run(["umount", "--lazy", str(self.experiments)], check=False)

    def round(self) -> list[Broken]:
        """Run one job with some faults and check what is left; return the violations."""
        self.rounds += 1
        seed = self.random.randrange(1 << 30)
        one = Round(self, random.Random(seed))
        found = [Broken(self.rounds, seed, one.faults, what) for what in one.run()]
        self.counts.update(one.faults)
        self.broken += found
        return found


class Round:
    def __init__(self, chaos: Chaos, chance: random.Random) -> None:
        self.chaos, self.chance = chaos, chance
        self.cluster, self.head = chaos.cluster, chaos.head
        self.faults: list[str] = []
        # Links are repaired before all else.
        self.links: dict[int, Callable[[], Any]] = {}
        self.repairs: dict[tuple[str, int], Callable[[], Any]] = {}
        self.commands: list[Command] = []
        self.wrong: list[str] = []
        self.disk_was_full = False
        for old in self.head.experiments:
            subprocess.run(["rm", "-rf", str(old)], check=True)

    def run(self) -> list[str]:
        how = self.chance.choice(["fine", "fine", "fails", "stubborn"])
        options = ["--nproc", "1", "--node-loss-timeout", f"{LEASE:g}", "--hang-timeout", "5"]
        options += ["--connect-timeout", "4", "--grace", "1"]
        self.launch = self.head.launch(*options, "chaotic.py", f"{self.chance.uniform(2, 5)}", how)
        self.commands.append(self.launch)
        # In the other cases faults may come while the job still starts.
        if self.chance.random() < 0.7:
            with contextlib.suppress(AssertionError):
                self.launch.wait_for("line 0 ", 30)
        for name in self.chance.choices(list(FAULTS), k=self.chance.randint(1, 3)):
            time.sleep(self.chance.uniform(0, 1.5))
            self.faults.append(name)
            with contextlib.suppress(ProcessLookupError, KeyError):
                FAULTS[name](self)
        time.sleep(self.chance.choice([0, 1, 3, LEASE + 4]))
        for repair in [*self.links.values(), *self.repairs.values()]:
            repair()
        self.conclude()
        self.look()
        return self.wrong

    def host(self) -> int:
        return self.chance.randrange(self.cluster.size)

    def command(self, *words: str) -> Command:
        self.commands.append(self.head.command(*words))
        return self.commands[-1]

    # -- what a user does when all is well again ---------------------------------------------------

    def conclude(self) -> None:
        for command in self.commands:
            self.end_of(command)
        # After a head was killed, another one follows the job to its end.
        for _ in range(3):
            if not self.head.experiments or self.state() not in ("starting", "running"):
                break
            self.end_of(self.command("orchestrator", "attach"))
        # A lost node was not there to be told: `stop` again finishes it.
        if self.head.experiments:
            last = self.command("orchestrator", "stop", "--now")
            if self.end_of(last) != 0:
                self.wrong.append(f"`stop --now` on a whole cluster did not end well:\n{last.text}")
            self.chaos.ends[self.state()] += 1

    def end_of(self, command: Command) -> int | None:
        try:
            code = command.finish(LIMIT)
        except AssertionError:
            self.wrong.append(f"it did not end within {LIMIT:.0f} s:\n{command.text}")
            return None
        if code not in CODES and code != -signal.SIGKILL:
            self.wrong.append(f"exit code {code}:\n{command.text}")
        return code

    # -- the invariants ----------------------------------------------------------------------------

    def state(self) -> str:
        return str(self.head.record["state"])

    def look(self) -> None:
        for command in self.commands:
            said = [line for line in command.lines if not line.startswith("node")]
            if any("Traceback" in line for line in said):
                self.wrong.append("a trace on the screen:\n" + "\n".join(said))
        # If no head knows of them, the lease ends processes that a killed head had started.
        if not self.head.nothing_left(LEASE + 25):
            left = {i: self.cluster.processes(i, TAG) for i in range(self.cluster.size)}
            self.wrong.append(f"processes are left: {left}")
        for i in range(self.cluster.size):
            if sleepers(self, i):
                self.wrong.append(f"scrubbed children are left on host {i}")
                # Otherwise each later round would report them again.
                kill_of(self, i, sleepers(self, i))
        for i, bystander in enumerate(self.chaos.bystanders):
            if bystander.poll() is not None:
                self.wrong.append(f"the bystander on host {i} was killed")
        if self.head.experiments:
            self.look_at_record()

    def look_at_record(self) -> None:
        record = self.head.record
        state, cause = record["state"], record["verdict"]
        if state in ("starting", "running"):
            self.wrong.append(f"the job is over, and its record says {state}")
        if state == "failed" and not (cause and cause["kind"] and cause["message"]):
            self.wrong.append(f"failed without a cause: {cause}")
        for node in record["nodes"]:
            for what in self.look_at_log(node["index"]):
                self.wrong.append(f"node {node['index']}: {what}")

    def look_at_log(self, node: int) -> Iterator[str]:
        """Check that each line is there once and in order, byte for byte as on the node."""
        try:
            home = self.head.log(node)
        except ValueError:
            # The node has not sent anything.
            home = b""
        numbers = [int(n) for n in re.findall(rb"^line \d+ (\d+) x{60}$", home, re.MULTILINE)]
        if not self.disk_was_full and numbers != list(range(len(numbers))):
            gap = next(i for i, n in enumerate(numbers) if i != n)
            yield f"after line {gap - 1} comes {numbers[gap]}"
        with contextlib.suppress(FileNotFoundError):
            there = self.head.node_file(node, "log").read_bytes()
            if not there.startswith(home):
                yield f"its log here ({len(home)} bytes) is not how the one there begins"
            if self.state() in ("done", "failed") and len(home) < len(there):
                yield f"{len(there) - len(home)} bytes of its log did not come home"


# -- the faults -----------------------------------------------------------------------------------


def cut_link(one: Round) -> None:
    host = one.host()
    one.cluster.cut(host)
    one.links[host] = lambda: one.cluster.restore(host)


def sshd_is_gone(one: Round) -> None:
    host = one.host()
    one.cluster.kill_sshd(host)
    one.repairs["sshd", host] = lambda: one.cluster.start_sshd(host)


def sshd_hangs(one: Round) -> None:
    host = one.host()
    if ("sshd", host) not in one.repairs:
        one.cluster.hang_handshake(host)
        one.repairs["sshd", host] = lambda: one.cluster.start_sshd(host)


def reboot(one: Round) -> None:
    """Kill all processes of a host at once, and bring it back."""
    host = one.host()
    one.cluster.cut(host)
    one.cluster.kill_sshd(host)
    kill_of(one, host, ours(one, host))
    kill_of(one, host, sleepers(one, host))
    one.cluster.restore(host)
    one.repairs["sshd", host] = lambda: one.cluster.start_sshd(host)


def frozen(one: Round) -> None:
    """Send SIGSTOP to all processes of the job on a host, including the supervisor."""
    host = one.host()
    for pid in ours(one, host):
        with contextlib.suppress(KeyError, ProcessLookupError):
            one.cluster.kill(host, pid, signal.SIGSTOP)

    def thaw() -> None:
        for pid in ours(one, host):
            with contextlib.suppress(KeyError, ProcessLookupError):
                one.cluster.kill(host, pid, signal.SIGCONT)

    one.repairs["frozen", host] = thaw


def rank_dies(one: Round) -> None:
    host = one.host()
    kill_of(one, host, one.cluster.processes(host, "RANK=")[-1:])


def anything_dies(one: Round) -> None:
    """Kill one process of the job on a host: an agent, a keeper, a rank or the supervisor."""
    host = one.host()
    pids = ours(one, host)
    kill_of(one, host, [one.chance.choice(pids)] if pids else [])


def disk_of_a_node(one: Round) -> None:
    host = one.host()
    if one.disk_was_full:
        return
    one.disk_was_full = True
    one.cluster.fill_disk(host, one.cluster.home_path)
    one.repairs["disk", host] = lambda: one.cluster.free_disk(host, one.cluster.home_path)


def disk_of_the_head(one: Round) -> None:
    filler = one.chaos.experiments / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    one.repairs["disk", -1] = lambda: filler.unlink(missing_ok=True)


def head_is_killed(one: Round) -> None:
    one.commands[0].process.kill()


def head_stands_still(one: Round) -> None:
    process = one.commands[0].process
    process.send_signal(signal.SIGSTOP)
    one.repairs["head", -1] = lambda: process.send_signal(signal.SIGCONT)


def ctrl_c(one: Round) -> None:
    for _ in range(one.chance.choice([1, 2, 10])):
        one.commands[0].interrupt()
        time.sleep(one.chance.uniform(0, 0.1))


def stop(one: Round) -> None:
    one.command("orchestrator", "stop", *one.chance.choice([["--now"], ["--grace", "0.5"], []]))


def emergency(one: Round) -> None:
    one.command("emergency_stop")


def steal(one: Round) -> None:
    one.command("orchestrator", "attach", "--steal")


def ask(one: Round) -> None:
    one.command("orchestrator", "status", "--json")


def ours(one: Round, host: int) -> list[int]:
    """Return the job's processes on a host, and the supervisor, which has no tag of the job."""
    return sorted({*one.cluster.processes(host, TAG), *named(one, host, "supervise")})


def sleepers(one: Round, host: int) -> list[int]:
    """Return the program's children that removed the job from their environment."""
    return named(one, host, "1000")


def named(one: Round, host: int, word: str) -> list[int]:
    """Return the processes with this word on their command line."""
    # Written so that grep's own command line does not match.
    pattern = f"[{word[0]}]{word[1:]}"
    look = f"grep -zlx '{pattern}' /proc/[0-9]*/cmdline 2>/dev/null | grep -o '[0-9]*' || true"
    return sorted(map(int, one.cluster.exec(host, ["sh", "-c", look]).split()))


def kill_of(one: Round, host: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(KeyError, ProcessLookupError):
            one.cluster.kill(host, pid)


FAULTS: dict[str, Callable[[Round], None]] = {
    "link cut": cut_link,
    "sshd gone": sshd_is_gone,
    "sshd hangs": sshd_hangs,
    "node rebooted": reboot,
    "node frozen": frozen,
    "rank killed": rank_dies,
    "any process killed": anything_dies,
    "disk full on a node": disk_of_a_node,
    "disk full on the head": disk_of_the_head,
    "head killed": head_is_killed,
    "head stands still": head_stands_still,
    "Ctrl-C": ctrl_c,
    "stop": stop,
    "emergency_stop": emergency,
    "attach --steal": steal,
    "status": ask,
}


def told(chaos: Chaos) -> str:
    """Return the faults, the ends of the jobs, and the violations as text."""
    lines = [f"{name}: {count}" for name, count in sorted(chaos.counts.items())]
    ends = ", ".join(f"{count} {state}" for state, count in chaos.ends.most_common())
    lines += [f"{chaos.rounds} jobs: {ends}", f"{len(chaos.broken)} violations"]
    for one in chaos.broken:
        lines.append(f"round {one.round} (seed {one.seed}), {', '.join(one.faults)}: {one.what}")
    return "\n".join(lines)


def as_data(chaos: Chaos) -> dict[str, Any]:
    broken = [json.loads(json.dumps(one.__dict__)) for one in chaos.broken]
    return {"jobs": chaos.rounds, "faults": chaos.counts, "ends": chaos.ends, "broken": broken}
