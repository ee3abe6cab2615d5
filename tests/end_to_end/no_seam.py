"""One training with random faults, and the same without: nothing of the faults may be seen in it.

Four nodes train and one stands by. The faults come at random steps in a random order, which a seed
repeats. Then the losses of all steps, the samples of all steps and the weights at the end are
those of the training without faults, to the bit, and each sample was seen once.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.records.metrics import trainers
from tests.clusters.netns import NetnsCluster
from tests.launching import Command, Head

NODES, STEPS_BETWEEN, BATCH = 4, 8, 2
LEASE = 8.0  # --node-loss-timeout
PATIENCE = 180.0  # for the next good step, on a machine that does much else
MOMENTS = 3.0  # the longest cut of a link that is no loss of a node
PROGRAM = """
import hashlib, os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from orchestrator import Trainer

steps, pace = int(sys.argv[1]), float(sys.argv[2])
out, rank = os.path.join(os.environ["ORCHESTRATOR_EXPERIMENT"], "outputs"), os.environ["RANK"]

class Numbered(Dataset):
    def __len__(self):
        return steps * int(os.environ["WORLD_SIZE"]) * {batch}
    def __getitem__(self, number):
        x = torch.randn(16, generator=torch.Generator().manual_seed(number))
        return number, x, x[:4].sin() + x[4:8]

def step(model, batch):
    numbers, x, y = batch
    time.sleep(pace)
    with open(os.path.join(out, f"seen_{rank}.txt"), "a") as file:
        file.write(f"{trainer.state.step + 1} {' '.join(map(str, numbers.tolist()))}\\n")
    return (model(x) - y).square().mean(), len(numbers)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
config = {"checkpoint": {"memory_every": 1}, "logging": {"interval": 1}}
trainer = Trainer(
    model, torch.optim.AdamW(model.parameters(), lr=3e-3), step=step, strategy="full_shard",
    config=config,
)
trainer.train(
    DataLoader(Numbered(), batch_size={batch}, shuffle=True), epochs=1, save_every="20 steps"
)
shards = [getattr(part, "to_local", lambda part=part: part)() for part in model.parameters()]
digest = hashlib.sha256(b"".join(shard.detach().numpy().tobytes() for shard in shards))
with open(os.path.join(out, f"weights_{rank}.txt"), "w") as file:
    file.write(digest.hexdigest())
""".replace("{batch}", str(BATCH))


class Seam(AssertionError):
    """The faults left a trace, or the job did not go on."""


@dataclass(frozen=True)
class Noted:
    """A fault that came: at which step, and how long it took until the next one that was new."""

    step: int
    kind: str
    where: str
    seconds: float
    attempts: int  # that the job had begun by then


@dataclass(frozen=True)
class Trained:
    """What a training left: all that has to be the same."""

    losses: Mapping[int, float]
    samples: Mapping[tuple[int, int], tuple[int, ...]]  # (step, rank) -> their numbers
    weights: tuple[str, ...]  # a digest for each rank


@dataclass
class NoSeam:
    """A cluster of NODES + 1 hosts, on which the two trainings run."""

    cluster: NetnsCluster
    directory: Path
    seed: int
    faults: int
    pace: float = 0.1  # seconds of a step
    minutes: float = float("inf")  # no further fault comes after so long
    say: Callable[[str], object] = print
    noted: list[Noted] = field(default_factory=list)
    repairs: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.head = Head(self.cluster, self.directory)
        *nodes, spare = self.cluster.addresses
        self.head.node_list = self.cluster.write_list([*nodes, f"{spare} spare"], "spare.txt")
        self.head.script("train.py", PROGRAM)
        self.steps = (self.faults + 1) * STEPS_BETWEEN
        self.hit = False  # something was killed or cut that the training cannot do without
        self.command: Command

    def run(self) -> tuple[Trained, Trained]:
        """Train with the faults and without; Seam if they differ."""
        self.launch(self.pace)
        end = time.monotonic() + 60 * self.minutes
        try:
            for number, kind in enumerate(order(self.chance, self.faults), 1):
                self.await_step(number * STEPS_BETWEEN - self.chance.randrange(STEPS_BETWEEN // 2))
                if time.monotonic() > end:
                    break
                self.suffer(kind)
            self.finish()
        finally:
            self.repair()
        broken = trained(self.head.experiment)
        self.launch(0.0)
        self.finish()
        whole = trained(self.head.experiment)
        compare(broken, whole, self.steps)
        return broken, whole

    def launch(self, pace: float) -> None:
        options = ["--nproc", "1", "--max-restarts", str(5 * self.faults + 5), "--quiet"]
        options += ["--node-loss-timeout", f"{LEASE:g}", "--connect-timeout", "5"]
        self.command = self.head.launch(*options, "train.py", str(self.steps), str(pace))

    def finish(self) -> None:
        code = self.command.finish(PATIENCE + self.steps)
        if code:
            raise Seam(f"it ended with {code}:\n{self.command.text}")

    # -- one fault ---------------------------------------------------------------------------

    def suffer(self, kind: str) -> None:
        """Let a fault come, wait until the training has passed it, and put right what it broke."""
        self.until(lambda: self.head.record["state"] == "running", "a job that runs")
        before, began, attempts = self.step, time.monotonic(), len(self.head.record["attempts"])
        self.hit = False
        where = FAULTS[kind](self)
        if self.hit:
            self.await_next_attempt(attempts)
        self.await_step(max(before, self.step) + 2)
        self.repair()
        seconds = time.monotonic() - began
        attempts = len(self.head.record["attempts"]) + 1
        self.noted.append(Noted(before, kind, where, seconds, attempts))
        self.say(f"{len(self.noted)}: {kind} ({where}) at step {before}, {seconds:.1f} s")

    def repair(self) -> None:
        while self.repairs:
            self.repairs.pop()()

    @property
    def step(self) -> int:
        return int(trainers.last(self.head.experiment / "outputs/rank_00_metrics.jsonl").step or 0)

    def await_step(self, step: int) -> None:
        self.until(lambda: self.step >= min(step, self.steps), f"step {step}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (self.head.experiments and condition()):
            if self.command.process.poll() not in (None, 0):
                self.command.finish(10.0)
                raise Seam(f"the head ended before {what}:\n{self.command.text}")
            if time.monotonic() > deadline:
                record = json.dumps(self.head.record, indent=1)
                raise Seam(f"{what} did not come:\n{record}")
            time.sleep(0.01)

    # -- whom it may meet --------------------------------------------------------------------

    def node(self) -> int:
        return self.chance.randrange(NODES)

    def host(self, node: int) -> int:
        """The host that is this node of the job now."""
        return self.cluster.addresses.index(self.head.record["nodes"][node]["address"])

    def kill_rank(self, node: int) -> None:
        """Kill the rank of a node; `hit` tells whether there was one."""
        self.kill(node, ["pkill", "-KILL", "-x", f"rank{node}"])

    def kill_started(self, node: int, what: str) -> None:
        """Kill the torchrun (`agent`) or the supervisor of a node."""
        events = self.head.cluster.run_home(self.host(node)) / "runs" / self.head.record["job"]
        for line in (events / str(node) / "events.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                if (event := json.loads(line.strip("\0"))).get("event") == "started":
                    self.kill(node, ["kill", "-KILL", str(event[what])])

    def kill(self, node: int, words: list[str]) -> None:
        with contextlib.suppress(AssertionError):  # it has just ended by itself
            self.cluster.exec(self.host(node), words)
            self.hit = True

    def cut(self, node: int) -> str:
        """Cut a node off until the training has gone on without it."""
        host = self.host(node)
        self.cluster.cut(host)
        self.hit = True
        self.repairs.append(lambda: self.cluster.restore(host))
        return f"node {node}, host {host}"

    def await_next_attempt(self, before: int) -> None:
        self.until(lambda: len(self.head.record["attempts"]) > before, "the end of the attempt")

    def lose_head(self, *words: str) -> None:
        self.command.process.kill()
        self.command.process.wait()
        self.command = self.head.command("orchestrator", *words)


# -- the faults: each says where it came ----------------------------------------------------------


def rank(one: NoSeam) -> str:
    node = one.node()
    one.kill_rank(node)
    return f"node {node}"


def torchrun(one: NoSeam) -> str:
    node = one.node()
    one.kill_started(node, "agent")
    return f"node {node}"


def supervisor(one: NoSeam) -> str:
    node = one.node()
    one.kill_started(node, "supervisor")
    return f"node {node}"


def node_cut_off(one: NoSeam) -> str:
    return one.cut(one.chance.randrange(1, NODES))


def masters_node(one: NoSeam) -> str:
    return one.cut(0)


def link_for_moments(one: NoSeam) -> str:
    """Shorter than anybody's patience: nothing has to follow from it."""
    host, seconds = one.host(one.node()), one.chance.uniform(0.2, MOMENTS)
    one.cluster.cut(host)
    time.sleep(seconds)
    one.cluster.restore(host)
    return f"host {host}, {seconds:.1f} s"


def reboot(one: NoSeam) -> str:
    """Everything on a node dies at once, and the node is away for a while."""
    node = one.node()
    host = one.host(node)
    where = one.cut(node)
    one.cluster.kill_sshd(host)
    for pid in one.cluster.processes(host, "ORCHESTRATOR_"):
        with contextlib.suppress(KeyError, ProcessLookupError):
            one.cluster.kill(host, pid)
    one.repairs.insert(0, lambda: one.cluster.start_sshd(host))
    return where


def two_at_once(one: NoSeam) -> str:
    first, second = one.chance.sample(range(NODES), 2)
    one.kill_rank(first)
    one.kill_started(second, one.chance.choice(["agent", "supervisor"]))
    return f"nodes {first} and {second}"


def a_second_in_the_recovery(one: NoSeam) -> str:
    """As soon as a rank of the next attempt is there, or a little later, it dies too."""
    first, second = one.node(), one.node()
    before = len(one.head.record["attempts"])
    one.kill_rank(first)
    one.await_next_attempt(before)
    if one.chance.random() < 0.5:
        one.until(lambda: one.head.record["state"] == "running", "the next attempt")
        time.sleep(one.chance.uniform(0.0, 0.5))
    one.hit = False
    one.until(lambda: one.kill_rank(second) or one.hit, f"rank {second} of the next attempt")
    return f"nodes {first} and {second}"


def head(one: NoSeam) -> str:
    one.lose_head("attach", "--quiet")
    return "attach"


def head_in_the_recovery(one: NoSeam) -> str:
    node, before = one.node(), len(one.head.record["attempts"])
    one.kill_rank(node)
    if one.chance.random() < 0.7:
        one.await_next_attempt(before)
    time.sleep(one.chance.uniform(0.0, 0.3))
    words = one.chance.choice([["attach", "--quiet"], ["watch"]])
    one.lose_head(*words)
    return f"node {node}, {words[0]}"


FAULTS: dict[str, Callable[[NoSeam], str]] = {
    "rank killed": rank,
    "torchrun killed": torchrun,
    "supervisor killed": supervisor,
    "node cut off": node_cut_off,
    "master's node cut off": masters_node,
    "link cut for moments": link_for_moments,
    "node rebooted": reboot,
    "two at once": two_at_once,
    "another in the recovery": a_second_in_the_recovery,
    "head killed": head,
    "head killed in the recovery": head_in_the_recovery,
}


def order(chance: random.Random, faults: int) -> list[str]:
    """Return kinds in a random order, each as often as the others or once more."""
    chosen = list[str]()
    while len(chosen) < faults:
        chosen += chance.sample([*FAULTS], len(FAULTS))
    chance.shuffle(chosen := chosen[:faults])
    return chosen


# -- what is left ---------------------------------------------------------------------------------


def trained(experiment: Path) -> Trained:
    """Read what a training wrote. Of a step that was taken again, the last time counts."""
    outputs = experiment / "outputs"
    metrics = (outputs / "rank_00_metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, metrics) if "loss" in line]  # and one for the epoch
    losses = {line["step"]: line["loss"] for line in lines}
    samples: dict[tuple[int, int], tuple[int, ...]] = {}
    for number in range(NODES):
        for line in (outputs / f"seen_{number}.txt").read_text().splitlines():
            step, *seen = map(int, line.split())
            samples[step, number] = tuple(seen)
    weights = (outputs / f"weights_{number}.txt" for number in range(NODES))
    return Trained(losses, samples, tuple(path.read_text() for path in weights))


def compare(broken: Trained, whole: Trained, steps: int) -> None:
    """Seam if the training with faults is not the other one, to the bit."""
    for name, one in (("with faults", broken), ("without", whole)):
        if sorted(one.losses) != list(range(1, steps + 1)):
            raise Seam(f"{name}: {len(one.losses)} of {steps} steps have a loss")
        counts = Counter(number for seen in one.samples.values() for number in seen)
        if dict(counts) != dict.fromkeys(range(steps * NODES * BATCH), 1):
            raise Seam(f"{name}: samples that were not seen once: {odd(counts, steps)}")
    for step, loss in whole.losses.items():
        if broken.losses[step] != loss:
            raise Seam(f"from step {step} on: loss {broken.losses[step]!r}, and {loss!r} without")
    if broken != whole:
        raise Seam("the losses are the same, and samples or weights are not")


def odd(counts: Counter[int], steps: int) -> dict[str, Any]:
    missing = sorted(set(range(steps * NODES * BATCH)) - set(counts))[:20]
    return {"left out": missing, "twice": [n for n, count in counts.items() if count > 1][:20]}
