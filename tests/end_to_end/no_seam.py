"""One training with random faults, and the same without: nothing of the faults may be seen in it.

All nodes train but the last, which stands by. The faults come at random steps, which a seed
repeats. Then the losses of all steps, the samples of all steps and the weights at the end are
those of the training without faults, to the bit, and each sample was seen once.
"""

import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clusters.netns import NetnsCluster
from tests.end_to_end.harm import PATIENCE, Harm, Seam
from tests.engine.worlds import Job, run

STEPS_BETWEEN, BATCH = 8, 2
LEASE = 8.0  # --node-loss-timeout
PROGRAM = """
import hashlib, os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from orchestrator import Trainer

steps, pace, out = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
rank = os.environ["RANK"]

class Numbered(Dataset):
    def __len__(self):
        return steps * int(os.environ["WORLD_SIZE"]) * {batch}
    def __getitem__(self, number):
        x = torch.randn(16, generator=torch.Generator().manual_seed(number))
        return number, x, x[:4].sin() + x[4:8]

def step(model, batch):
    numbers, x, y = batch
    time.sleep(pace)
    loss = (model(x) - y).square().mean()
    with open(os.path.join(out, f"seen_{rank}.txt"), "a") as file:
        seen = " ".join(map(str, numbers.tolist()))
        file.write(f"{trainer.state.step + 1} {loss.item().hex()} {seen}\\n")
    return loss, len(numbers)

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


@dataclass(frozen=True)
class Noted:
    """A fault that came: at which step, and how long it took until the next one that was new."""

    step: int
    kind: str
    where: str
    seconds: float
    # The job had begun this many attempts by then.
    attempts: int


@dataclass(frozen=True)
class Trained:
    """The results of a training that have to be the same in every run."""

    # The losses by step: the means of all ranks, or on private disks rank 0's own.
    losses: Mapping[int, float]
    # This maps (step, rank) to the samples' numbers.
    samples: Mapping[tuple[int, int], tuple[int, ...]]
    # Each rank has one digest.
    weights: tuple[str, ...]


class NoSeam(Harm):
    """The two trainings, the first with these faults; the last host of the cluster stands by."""

    def __init__(
        self,
        cluster: NetnsCluster,
        directory: Path,
        seed: int,
        faults: Sequence[tuple[str, Callable[[Harm], str]]],
        pace: float = 0.1,
        notes: Path | None = None,
    ) -> None:
        super().__init__(cluster, directory, seed, cluster.size - 1)
        # The pace is the length of a step in seconds.
        self.faults, self.pace = faults, pace
        # The ranks note what they see there. Nodes with private disks get a place that all share.
        self.private, self.notes = notes is not None, notes or directory / "notes"
        self.notes.mkdir(exist_ok=True)
        # No further fault starts after this time.
        self.minutes = float("inf")
        self.say: Callable[[str], object] = print
        self.noted: list[Noted] = []
        *nodes, spare = self.cluster.addresses
        self.head.node_list = self.cluster.write_list([*nodes, f"{spare} spare"], "spare.txt")
        self.head.script("train.py", PROGRAM)
        self.steps = (len(faults) + 1) * STEPS_BETWEEN

    def run(self) -> tuple[Trained, Trained]:
        """Train with the faults and without; Seam if they differ."""
        self.launch()
        end = time.monotonic() + 60 * self.minutes
        try:
            for number, (kind, fault) in enumerate(self.faults, 1):
                self.await_step(number * STEPS_BETWEEN - self.chance.randrange(STEPS_BETWEEN // 2))
                if time.monotonic() > end:
                    break
                self.suffer(kind, fault)
            self.finish()
        finally:
            self.repair()
        broken = self.trained(self.head.experiment, self.notes)
        whole = self.undisturbed()
        compare(broken, whole, self.steps)
        return broken, whole

    def trained(self, experiment: Path, notes: Path) -> Trained:
        return trained(None if self.private else experiment, notes, self.nodes)

    def undisturbed(self) -> Trained:
        """Train the same in ranks without nodes and supervisors."""
        notes = self.notes / "undisturbed"
        notes.mkdir()
        env = {"PROGRAM": str(self.head.directory / "train.py"), "STEPS": str(self.steps)}
        env["NOTES"] = str(notes)
        place, call = str(self.head.directory / "undisturbed"), "tests.end_to_end.no_seam:alone"
        job = Job(place, [1] * self.nodes, {}, env=env, call=call)
        assert run(job) == [[0] * self.nodes], job.output()
        return self.trained(job.experiment(), notes)

    def launch(self) -> None:
        restarts = str(5 * len(self.faults) + 5)
        options = ["--nproc", "1", "--max-restarts", restarts, "--quiet"]
        options += ["--node-loss-timeout", f"{LEASE:g}", "--connect-timeout", "5"]
        words = ["train.py", str(self.steps), str(self.pace), str(self.notes)]
        self.command = self.head.launch(*options, *words)

    def finish(self) -> None:
        code = self.command.finish(PATIENCE + self.steps)
        if code:
            raise Seam(f"it ended with {code}:\n{self.command.text}")

    # -- one fault ---------------------------------------------------------------------------

    def suffer(self, kind: str, fault: Callable[[Harm], str]) -> None:
        """Inject a fault, wait until the training has passed it, and repair the damage."""
        self.until(lambda: self.head.record["state"] == "running", "a job that runs")
        before, began, attempts = self.step, time.monotonic(), self.attempts
        self.victims.clear()
        where = fault(self)
        if self.victims:
            self.await_next_attempt(attempts)
        self.await_step(max(before, self.step) + 2)
        self.repair()
        seconds = time.monotonic() - began
        self.noted.append(Noted(before, kind, where, seconds, self.attempts + 1))
        self.say(f"{len(self.noted)}: {kind} ({where}) at step {before}, {seconds:.1f} s")

    @property
    def step(self) -> int:
        noted = self.notes / "seen_0.txt"
        lines = noted.read_text().rpartition("\n")[0].splitlines() if noted.exists() else []
        return int(lines[-1].split()[0]) if lines else 0

    def await_step(self, step: int) -> None:
        self.until(lambda: self.step >= min(step, self.steps), f"step {step}")


def alone(_: Path) -> None:
    """Run the program in a rank that was forked from a Python which has imported torch."""
    sys.argv = [os.environ["PROGRAM"], os.environ["STEPS"], "0", os.environ["NOTES"]]
    runpy.run_path(sys.argv[0], run_name="__main__")


# -- what is left ---------------------------------------------------------------------------------


def trained(experiment: Path | None, notes: Path, ranks: int) -> Trained:
    """Read what a training noted. Of a step that was taken again, the last time counts.

    With an experiment, the losses are those of its metrics, in which no line may be missing.
    """
    losses: dict[int, float] = {}
    samples: dict[tuple[int, int], tuple[int, ...]] = {}
    for number in reversed(range(ranks)):
        for line in (notes / f"seen_{number}.txt").read_text().splitlines():
            step, loss, *seen = line.split()
            losses[int(step)] = float.fromhex(loss)
            samples[int(step), number] = tuple(map(int, seen))
    if experiment is not None:
        metrics = (experiment / "outputs/rank_00_metrics.jsonl").read_text().splitlines()
        # The epoch writes a line of its own.
        lines = [line for line in map(json.loads, metrics) if "loss" in line]
        losses = {line["step"]: line["loss"] for line in lines}
    weights = (notes / f"weights_{number}.txt" for number in range(ranks))
    return Trained(losses, samples, tuple(path.read_text() for path in weights))


def compare(broken: Trained, whole: Trained, steps: int) -> None:
    """Seam if the training with faults is not the other one, to the bit."""
    samples = steps * len(whole.weights) * BATCH
    for name, one in (("with faults", broken), ("without", whole)):
        if sorted(one.losses) != list(range(1, steps + 1)):
            raise Seam(f"{name}: {len(one.losses)} of {steps} steps have a loss")
        counts = Counter(number for seen in one.samples.values() for number in seen)
        if dict(counts) != dict.fromkeys(range(samples), 1):
            raise Seam(f"{name}: samples that were not seen once: {odd(counts, samples)}")
    for step, loss in whole.losses.items():
        if broken.losses[step] != loss:
            raise Seam(f"from step {step} on: loss {broken.losses[step]!r}, and {loss!r} without")
    if broken != whole:
        raise Seam("the losses are the same, and samples or weights are not")


def odd(counts: Counter[int], samples: int) -> dict[str, Any]:
    missing = sorted(set(range(samples)) - set(counts))[:20]
    return {"left out": missing, "twice": [n for n, count in counts.items() if count > 1][:20]}
