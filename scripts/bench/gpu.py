#!/usr/bin/env python3
"""Check on a machine with CUDA what no other test can see, and print a table. Under 20 minutes.

    python scripts/bench/gpu.py [--only NAME,...] [--json FILE]

Every check is a process of its own, so that one that crashes costs only itself. A single GPU will
do: FSDP is made real there by a mesh of one. Exit code 0: all is as expected; 1: something is not;
3: there is no CUDA here. `--rehearse` runs the checks on the CPU with small models, to see that the
script itself works; what it measures then means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from orchestrator import Trainer  # noqa: E402
from orchestrator.config import load, parse  # noqa: E402
from orchestrator.config.schema import Config  # noqa: E402
from orchestrator.engine.observe import speed  # noqa: E402
from orchestrator.engine.observe.reporter import Reporting  # noqa: E402
from orchestrator.engine.ranks import ranks  # noqa: E402
from orchestrator.engine.ranks.ranks import Ranks  # noqa: E402
from orchestrator.engine.saving import checkpoint  # noqa: E402
from orchestrator.engine.saving.memory import Memory  # noqa: E402
from orchestrator.engine.saving.ownership import TrainingRun  # noqa: E402
from orchestrator.engine.saving.reader import load_into  # noqa: E402
from orchestrator.engine.sharding import mesh  # noqa: E402
from orchestrator.engine.train import training_of  # noqa: E402
from orchestrator.node.machine import nvidia  # noqa: E402
from orchestrator.traces import timeline  # noqa: E402

NO_CUDA = 3
# Seconds for one check.
LIMIT = 150.0
REHEARSING = os.environ.get("REHEARSING") == "1"
DEVICE = torch.device("cpu" if REHEARSING else "cuda")
# The size of the models here: 300 million weights on a GPU.
WIDTH, LAYERS = (32, 2) if REHEARSING else (2048, 12)


@dataclass(frozen=True)
class Seen:
    """The result of a check, in words; `good` is None where this machine cannot tell."""

    says: str
    good: bool | None


Check = Callable[[Path], Seen]
CHECKS: dict[str, tuple[str, Check]] = {}


def check(name: str, expected: str) -> Callable[[Check], Check]:
    def listed(function: Check) -> Check:
        CHECKS[name] = expected, function
        return function

    return listed


# -- parts that the checks share ------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


def data(size: int = 256) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(size, WIDTH), torch.randint(0, 10, (size,)))


@contextlib.contextmanager
def sharded() -> Iterator[None]:
    """With one process nothing is sharded; a mesh of one makes FSDP real on a single device."""
    plain = mesh.make_mesh

    def made(config: Config, everyone: Any) -> mesh.Mesh:
        row = dist.device_mesh.init_device_mesh(DEVICE.type, (everyone.world,))
        return mesh.Mesh(config.fsdp.sharding_strategy, 1, row)

    mesh.make_mesh = made  # type: ignore[assignment]
    try:
        yield
    finally:
        mesh.make_mesh = plain


def trainer(model: nn.Module | None = None, loss: Any = None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or Net()
    with sharded() if more.get("strategy") == "full_shard" else contextlib.nullcontext():
        return Trainer(
            model,
            torch.optim.AdamW(model.parameters(), 1e-4),
            loss or nn.CrossEntropyLoss(),
            **more,
        )


def peak(reset: bool = False) -> float:
    """Return the peak memory of tensors in megabytes."""
    if DEVICE.type != "cuda":
        return 0.0
    found = torch.cuda.max_memory_allocated() / 1e6
    if reset:
        torch.cuda.reset_peak_memory_stats()
        found = torch.cuda.memory_allocated() / 1e6
    return found


def engine(place: Path, sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with the built-in engine in this process, sharded; return the lines of its metrics."""
    os.environ["ORCHESTRATOR_EXPERIMENT"] = str(place)
    config = parse.build_dataclass(Config, sections)
    with sharded():
        made = training_of(config, ranks.join_group(config))
    made.train()
    lines = (place / "outputs/rank_00_metrics.jsonl").read_text(encoding="ascii").splitlines()
    return [line for line in map(json.loads, lines) if "step_ms" in line]


def llama(**training: Any) -> dict[str, Any]:
    """Return config/llama_1b.yaml, or the smallest of its kind in a rehearsal."""
    config = asdict(load.load_config(ROOT / "config/llama_1b.yaml", []))
    sections = {name: config[name] for name in ("training", "model", "dataset", "optimizer")}
    sections["compile"] = {"enabled": not REHEARSING}
    sections["checkpoint"] = {"at_end": False}
    sections["logging"] = {"interval": 5}
    sections["training"] |= {"gradient_accumulation": 1, "eval_batches": 2, **training}
    if REHEARSING:
        sections["model"] |= {"vocab_size": 64, "model_dim": 32, "num_layers": 2, "num_heads": 2}
        sections["model"] |= {"num_kv_heads": 1, "mlp_hidden_dim": 32}
        sections["dataset"] |= {"sequence_length": 16, "num_samples": 2000}
    return sections


def torchrun(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    count = max(1, torch.cuda.device_count())
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={count}",
            *words,
        ],
        cwd=place,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ORCHESTRATOR_EXPERIMENT": str(place)},
    )


# -- the checks -----------------------------------------------------------------------------------


@check("save: copies stay on the host", "under 1 byte per weight more on the GPU")
def staging(place: Path) -> Seen:
    made = trainer(strategy="full_shard")
    weights = sum(p.numel() for p in made.bare.parameters())
    made.train(DataLoader(data(), 32), epochs=1, verbose=False)
    peak(reset=True)
    made.train(DataLoader(data(), 32), epochs=2, verbose=False)
    before = peak()
    peak(reset=True)
    seen: set[str] = set()
    write = checkpoint.Checkpoints._write

    def watched(self: Any, step: int, state: dict[str, Tensor], *more: Any) -> None:
        seen.update(mesh.local_tensor(value).device.type for value in state.values())
        write(self, step, state, *more)

    checkpoint.Checkpoints._write = watched  # type: ignore[assignment, method-assign]
    made.train(DataLoader(data(), 32), epochs=3, save_to=place, save_every="4 steps", verbose=False)
    grown = (peak() - before) * 1e6 / weights
    return Seen(f"{grown:.2f} bytes, written from {', '.join(seen)}", grown < 1 and seen == {"cpu"})


@check("offload: moments survive a resume", "the same bits")
def offloaded(place: Path) -> Seen:
    if REHEARSING:
        return Seen("needs a GPU to offload from", None)
    keys = {"fsdp": {"cpu_offload": True}}

    def moments(made: Trainer) -> dict[str, Tensor]:
        state = made.parts.auxiliary.snapshot().tensors
        return {name: mesh.local_tensor(value).cpu().clone() for name, value in state.items()}

    first = trainer(strategy="full_shard", config=keys)
    first.train(DataLoader(data(), 32), epochs=1, verbose=False)
    first.save_checkpoint(place / "kept")
    again = trainer(strategy="full_shard", config=keys)
    again.load_checkpoint(place / "kept")
    one, other = moments(first), moments(again)
    same = one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    return Seen(f"{len(one)} tensors, {'equal' if same else 'different'}", same and bool(one))


@check("a loss with tensors of its own", "one step")
def weighted(place: Path) -> Seen:
    made = trainer(loss=nn.CrossEntropyLoss(weight=torch.rand(10)))
    (line,) = made.train(DataLoader(data(), 64), epochs=1, verbose=False)
    return Seen(f"loss {line['train_loss']:.3f}", line["train_loss"] > 0)


@check("the host waits for the GPU", "in no step without a line")
def waits(place: Path) -> Seen:
    if REHEARSING:
        return Seen("needs a GPU to wait for", None)
    heard: dict[int, int] = {}

    def listens(made: Trainer) -> None:
        torch.cuda.set_sync_debug_mode("warn" if 5 < made.state.step < 40 else "default")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        def counts(made: Trainer) -> None:
            heard[made.state.step] = len(told)
            listens(made)

        made = trainer(on_step_end=counts, log_every=1000)
        fit = DataLoader(data(32 * 60), 32, pin_memory=True)
        made.train(fit, epochs=1, verbose=False)
    torch.cuda.set_sync_debug_mode("default")
    count = heard[39] - heard[6]
    what = f": {str(told[heard[6]].message)[:80]}" if count else ""
    return Seen(f"{count} times in 33 steps{what}", count == 0)


@check("Trainer beside a plain loop", "at most 1.1 of its time")
def beside_a_loop(place: Path) -> Seen:
    steps = 20 if REHEARSING else 150
    fit = DataLoader(data(32 * steps), 32)
    times: list[float] = []

    def ticks(made: Trainer) -> None:
        if made.state.step in (steps // 4, steps - 1):
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    trainer(on_step_end=ticks, log_every=1000).train(fit, epochs=1, verbose=False)
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    adam = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    for index, (x, y) in enumerate(fit, start=1):
        F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        adam.step()
        adam.zero_grad()
        if index in (steps // 4, steps - 1):
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
    ratio = (times[1] - times[0]) / (times[3] - times[2])
    return Seen(f"{ratio:.2f}", ratio < 1.1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = x.mean((2, 3))
        return out


@check("BatchNorm in bf16", "sharded as on one process, to 1e-2")
def batch_norm(place: Path) -> Seen:
    torch.manual_seed(0)
    pictures = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 3, (64,)))
    found = []
    for strategy in ("none", "full_shard"):
        torch.manual_seed(0)
        made = trainer(Conv(), strategy=strategy, precision="bf16")
        found.append(made.train(DataLoader(pictures, 8), epochs=2, verbose=False)[-1]["train_loss"])
    apart = abs(found[0] - found[1])
    return Seen(f"{found[0]:.4f} and {found[1]:.4f}", apart < 1e-2)


class Clock(nn.Module):
    """Needs the whole number that it is given: seconds of a day, of which bf16 keeps 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 16)])
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        angle = x * (2 * torch.pi / 60.0)
        hidden = self.layers[0](torch.cat([angle.sin(), angle.cos()], 1)).tanh()
        out: Tensor = self.out(hidden)
        return out


@check("large inputs in bf16", "sharded as on one process, to 1e-2")
def large_inputs(place: Path) -> Seen:
    torch.manual_seed(0)
    seconds = torch.randint(0, 86400, (512, 1)).float()
    times = TensorDataset(seconds, (seconds * (2 * torch.pi / 60.0)).sin())
    found = []
    for strategy in ("none", "full_shard"):
        torch.manual_seed(0)
        made = trainer(Clock(), nn.MSELoss(), strategy=strategy, precision="bf16")
        found.append(made.train(DataLoader(times, 32), epochs=5, verbose=False)[-1]["train_loss"])
    return Seen(f"{found[0]:.4f} and {found[1]:.4f}", abs(found[0] - found[1]) < 1e-2)


@check("memory while a model is sharded", "at most 1.3 of its weights")
def spreading(place: Path) -> Seen:
    peak(reset=True)
    made = trainer(strategy="full_shard")
    weights = sum(p.numel() for p in made.bare.parameters()) * 4 / 1e6
    return Seen(f"{peak() / weights:.2f} of {weights:,.0f} MB", peak() <= 1.3 * weights)


@check("fp16 with sums of losses", "at most 5 of the first 50 steps skipped")
def first_scale(place: Path) -> Seen:
    def step(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        # As many targets as in batches of long texts.
        logits = model(batch[0]).repeat(2048, 1)
        targets = batch[1].repeat(2048)
        return F.cross_entropy(logits, targets, reduction="sum"), len(targets)

    torch.manual_seed(0)
    model = Net()
    made = Trainer(model, torch.optim.AdamW(model.parameters(), 1e-4), step=step, precision="fp16")
    made.train(DataLoader(data(50 * 32), 32), epochs=1, verbose=False)
    skipped = int(made.parts.steppers.first.skipped.item())
    return Seen(f"{skipped} skipped", skipped <= 5)


@check("a wrapper shows each rank one GPU", "local rank 1 takes it")
def one_visible(place: Path) -> Seen:
    if REHEARSING:
        return Seen("needs a GPU", None)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    code = "from orchestrator.engine.ranks import ranks; print(ranks.device_of_rank())"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": first, "LOCAL_RANK": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = done.stdout.strip().splitlines()[-1:]
    return Seen(" ".join(said)[-80:], done.returncode == 0 and said == ["cuda:0"])


@check("workers by fork after CUDA began", "an epoch, twice")
def forked(place: Path) -> Seen:
    made = trainer()
    for _ in range(2):
        made.train(
            DataLoader(data(), 32, num_workers=2, multiprocessing_context="fork"),
            epochs=made.state.epoch + 1,
            verbose=False,
        )
    return Seen(f"{made.state.epoch} epochs", made.state.epoch == 2)


@check("llama_1b: speed and evaluation", "an evaluation takes no more memory than training")
def llama_1b(place: Path) -> Seen:
    lines = engine(place, llama(max_steps=30, eval_steps=20))
    trained = [line for line in lines if line.get("loss") is not None]
    before = max(line["memory_peak_bytes"] for line in trained if line["step"] < 20)
    after, last = trained[-1]["memory_peak_bytes"], trained[-1]
    mfu = "unknown" if last["mfu"] is None else f"{last['mfu']:.1%}"
    says = (
        f"{last['tokens_per_s']:,.0f} tokens/s, mfu {mfu}, {last['step_ms']:,.0f} ms/step,"
        f" {before / 1e9:.1f} GB, with an evaluation {after / 1e9:.1f} GB"
    )
    return Seen(says, REHEARSING or after <= 1.05 * before)


@check("llama_1b: a hand loop", "the engine is at most 1.05 of its time")
def hand_loop(place: Path) -> Seen:
    if REHEARSING:
        return Seen("not rehearsed", None)
    lines = engine(place, llama(max_steps=30, eval_steps=None, eval_batches=None))
    ours = lines[-1]["step_ms"]
    sections = llama(max_steps=30)
    words = [
        f"{section}.{key}={json.dumps(value)}"
        for section in ("model", "dataset")
        for key, value in sections[section].items()
        if value is not None and not isinstance(value, dict)
    ]
    words += ["training.mixed_precision=bf16", "training.max_steps=30", "compile.enabled=true"]
    words += [f"training.batch_size={sections['training']['batch_size']}"]
    done = torchrun(
        place,
        str(ROOT / "scripts/bench/hand_loop.py"),
        *(word for setting in words for word in ("--set", setting)),
    )
    if done.returncode:
        return Seen(done.stdout.strip()[-200:], False)
    seconds = json.loads(done.stdout.strip().splitlines()[-1])
    theirs = sorted(seconds[10:])[len(seconds[10:]) // 2] * 1e3
    return Seen(
        f"{ours:,.0f} ms beside {theirs:,.0f} ms: {ours / theirs:.3f}", ours / theirs < 1.05
    )


@check("llama_1b: HF Trainer", "the engine is faster")
def hf_trainer(place: Path) -> Seen:
    if REHEARSING or importlib.util.find_spec("transformers") is None:
        return Seen("not rehearsed" if REHEARSING else "transformers is not installed", None)
    sections = llama(max_steps=30, eval_steps=None, eval_batches=None)
    ours = engine(place, sections)[-1]["tokens_per_s"]
    words = {**sections["model"], "sequence_length": sections["dataset"]["sequence_length"]}
    # Smaller batches are tried, as transformers needs more memory.
    for batch in (sections["training"]["batch_size"], 2, 1):
        done = torchrun(
            place, str(ROOT / "scripts/bench/hf_loop.py"), json.dumps(words), str(batch)
        )
        if done.returncode == 0:
            theirs = json.loads(done.stdout.strip().splitlines()[-1])
            says = f"{theirs:,.0f} tokens/s at {batch} samples beside {ours:,.0f}"
            return Seen(f"{says}: {ours / theirs:.2f}", ours > theirs)
    return Seen(done.stdout.strip()[-200:], None)


@check("llama_1b: torchtitan", "measured where it is installed")
def torchtitan(place: Path) -> Seen:
    there = importlib.util.find_spec("torchtitan") is not None
    return Seen("installed: compare by hand" if there else "torchtitan is not installed", None)


@check("compile: new graphs in an evaluation", "none after the first")
def recompiles(place: Path) -> Seen:
    from torch._dynamo.utils import counters

    sections = llama(max_steps=4, eval_steps=2)
    sections["compile"] = {"enabled": True, "backend": "eager" if REHEARSING else "inductor"}
    graphs = []
    said = Reporting.say

    def noted(self: Reporting, text: str) -> None:
        graphs.append((text[:24], counters["stats"]["unique_graphs"]))
        said(self, text)

    Reporting.say = noted  # type: ignore[method-assign]
    engine(place, sections)
    trained, evaluated = graphs[0][1], counters["stats"]["unique_graphs"]
    layers = sections["model"]["num_layers"]
    return Seen(f"{evaluated - trained} graphs in all for {layers} blocks", evaluated <= 3 * layers)


@check("checkpoint: training waits", "a tenth of a save that is not asynchronous")
def stall(place: Path) -> Seen:
    found, stores = [], list[checkpoint.Checkpoints]()
    save = checkpoint.Checkpoints.save

    def timed(self: Any, *words: Any, **more: Any) -> None:
        save(self, *words, **more)
        stores[:] = [self]
        stalled.append(self.stalled * 1e3)

    def written(made: Trainer) -> None:
        for store in stores:
            # Without this, the next save would wait for it.
            store.wait()

    checkpoint.Checkpoints.save = timed  # type: ignore[method-assign]
    for how in (True, False):
        stalled: list[float] = []
        made = trainer(
            strategy="full_shard", config={"checkpoint": {"asynchronous": how}}, on_step_end=written
        )
        # The first save has to make its memory.
        saves: dict[str, Any] = {"save_to": place / str(how), "save_every": "4 steps"}
        made.train(DataLoader(data(), 32), epochs=1, verbose=False, **saves)
        found.append(stalled[1])
    return Seen(
        f"{found[0]:,.0f} ms, else {found[1]:,.0f} ms", REHEARSING or found[0] < found[1] / 10
    )


@check("a state in memory while training goes on", "as it was when it was kept")
def kept_in_memory(place: Path) -> Seen:
    """Weights change, and memory is used again, as soon as save() has returned."""
    size = 1 << (16 if REHEARSING else 28)
    alone = Ranks(0, 1, 0, torch.device("cpu"), ((0, "here"),))
    state = {"model.weight": torch.ones(size, device=DEVICE)}
    memory = Memory(place / "t", alone, TrainingRun(), print, node_holds_all=True)
    wrong = 0
    for step in range(1, 5):
        state["made"] = torch.ones(size, device=DEVICE)
        memory.save(step, state, {})
        del state["made"]
        reused = torch.zeros(size, device=DEVICE)
        state["model.weight"].zero_()
        memory.wait()
        kept = {name: torch.zeros(size) for name in ("model.weight", "made")}
        load_into(kept, place / f"t/step_{step:08d}")
        wrong += sum(int((value != 1).sum()) for value in kept.values())
        del reused
        state["model.weight"].fill_(1.0)
    memory.end()
    return Seen(f"{wrong} numbers are not", wrong == 0)


@check("profile and overlap", "computation and communication are found")
def profiled(place: Path) -> Seen:
    sections = llama(max_steps=12, eval_steps=None, eval_batches=None)
    sections["profiling"] = {"enabled": True}
    engine(place, sections)
    traces = dict(
        timeline.read_trace(path) for path in (place / "outputs/profile").glob("rank_*.json.gz")
    )
    found = timeline.compare_ranks({number or 0: each for number, each in traces.items()})
    text = json.dumps(timeline.overlap_as_data(found))
    return Seen(text[:100], "compute_ms" in text)


@check("verify over NCCL", "exit code 0")
def verified(place: Path) -> Seen:
    done = torchrun(
        place,
        "-m",
        "orchestrator.engine.verify",
        "--seconds",
        "10",
        "--max-size",
        str(1 << (20 if REHEARSING else 28)),
    )
    there = (place / "outputs/verify.json").exists()
    says = "written" if done.returncode == 0 and there else done.stdout.strip()[-100:]
    return Seen(says, done.returncode == 0 and there)


@check("nvidia-smi is understood", "as many GPUs as torch sees, with names and memory")
def smi(place: Path) -> Seen:
    if REHEARSING:
        return Seen("needs nvidia-smi", None)
    cards = nvidia.gpus_of_rows(nvidia.query_smi("gpu", nvidia.GPU_FIELDS, nvidia.QUERY_SECONDS)[0])
    whole = all(card.model and card.memory and card.uuid for card in cards)
    says = ", ".join(f"{card.model}, {card.memory or 0:,} bytes" for card in cards)
    return Seen(says, len(cards) >= torch.cuda.device_count() and whole)


@check("this card's figures", "in the table of vendors' figures")
def figures(place: Path) -> Seen:
    name = ranks.device_name(ranks.device_of_rank())
    known = speed.peak_flops(name, "bf16")
    measured = speed.measured_matmul_flops(DEVICE, "bf16") / 1e12
    says = f"{name}: {measured:,.0f} of {known / 1e12 if known else 0:,.0f} TFLOP/s in bf16"
    return Seen(says, None if known is None else measured <= known / 1e12)


@check("fp8", "measured where torchao is installed")
def fp8(place: Path) -> Seen:
    if importlib.util.find_spec("torchao") is None:
        return Seen("torchao is not installed", None)
    from torchao.float8 import convert_to_float8_training

    # Its sizes have to be multiples of 16.
    wide = convert_to_float8_training(
        Net(), module_filter_fn=lambda module, name: module.out_features % 16 == 0
    )
    made = trainer(wide, precision="bf16", strategy="full_shard")
    (line,) = made.train(DataLoader(data(), 64), epochs=1, verbose=False)
    return Seen(f"loss {line['train_loss']:.3f}", line["train_loss"] > 0)


@check("nanoGPT's own train.py", "trains, then resumes from its checkpoint")
def nanogpt(place: Path) -> Seen:
    """Under DDP, or in a rehearsal as one process: nanoGPT's DDP knows CUDA alone."""
    if importlib.util.find_spec("requests") is None:
        return Seen("requests is not installed", None)
    own = shutil.copytree(ROOT / "scripts/examples/nanoGPT", place / "nanoGPT")
    text = own / "data/shakespeare_char"
    shutil.copy(own / "model.py", text / "input.txt")
    subprocess.run([sys.executable, "prepare.py"], cwd=text, check=True, capture_output=True)
    words = ["train.py", "config/train_shakespeare_char.py", "config/resume.py"]
    words += ["--max_iters=20", "--eval_interval=10", "--eval_iters=2", "--compile=False"]
    words += [f"--gradient_accumulation_steps={max(1, torch.cuda.device_count())}"]
    if REHEARSING:
        words.insert(2, "config/small_cpu.py")

    def trained() -> str:
        if not REHEARSING:
            return torchrun(own, *words).stdout
        alone = [sys.executable, *words]
        return subprocess.run(alone, cwd=own, text=True, check=True, capture_output=True).stdout

    first, again = trained(), trained()
    good = "iter 20: loss" in first and "Resuming training from" in again
    return Seen(f"resumed: {'iter 20: loss' in again}", good and "iter 0: loss" not in again)


@check("time to the first step over NCCL", "measured with two GPUs or more")
def first_step(place: Path) -> Seen:
    if torch.cuda.device_count() < 2:
        return Seen("there is one GPU", None)
    began = time.monotonic()
    done = torchrun(place, "-m", "orchestrator.engine.train", "--set", "training.max_steps=1")
    return Seen(f"{time.monotonic() - began:.1f} s", done.returncode == 0)


# -- all of them ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="names of checks, or parts of them, with commas between")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU: does this script work?"
    )
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        with tempfile.TemporaryDirectory() as place:
            seen = CHECKS[options.check][1](Path(place))
        sys.stdout.write("\n" + json.dumps(asdict(seen)) + "\n")
        return 0
    if not torch.cuda.is_available() and not options.rehearse:
        sys.stderr.write("there is no CUDA here: nothing was checked\n")
        return NO_CUDA
    name = ranks.device_name(torch.device("cpu" if options.rehearse else "cuda"))
    wanted = options.only.split(",") if options.only else [""]
    rows = {}
    for title, (expected, _) in CHECKS.items():
        if any(part.lower() in title.lower() for part in wanted):
            sys.stderr.write(f"{title} ...\n")
            rows[title] = (expected, run_alone(title, rehearsing=options.rehearse))
    sys.stdout.write(table(name, rows))
    if options.json:
        found = {title: asdict(seen) for title, (_, seen) in rows.items()}
        options.json.write_text(json.dumps({"device": name, "checks": found}, indent=2) + "\n")
    return int(any(seen.good is False for _, seen in rows.values()))


def run_alone(title: str, *, rehearsing: bool) -> Seen:
    """Run one check in a process of its own; its last line is what it has seen."""
    env = {**os.environ, "REHEARSING": str(int(rehearsing)), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--check", title],
            text=True,
            env=env,
            capture_output=True,
            check=False,
            timeout=LIMIT * (6 if rehearsing else 1),
        )
    except subprocess.TimeoutExpired:
        return Seen(f"not done within {LIMIT:.0f} s", False)
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        return Seen(**json.loads(last[0]))
    except (ValueError, TypeError):
        words = (done.stderr.strip().splitlines()[-1:] or last)[0]
        return Seen(f"exit code {done.returncode}: {words[:150]}", False)


def table(name: str, rows: dict[str, tuple[str, Seen]]) -> str:
    words = {True: "good", False: "BAD", None: "-"}
    lines = [
        f"{name}, torch {torch.__version__}",
        "",
        "| check | seen | expected | |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {title} | {seen.says} | {expected} | {words[seen.good]} |"
        for title, (expected, seen) in rows.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
