"""Compare the engine with a minimal hand-written loop of the same FSDP2 calls; measure a save, and
what a step of a tiny model costs the host, beside other trainers.

    python scripts/bench/engine.py [--ranks 2] [--json]

Every contender runs under torchrun on this machine, in turn, `--repeat` times, on GPUs if there are
any, else on CPUs with gloo. The figures are medians; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ground import machine, progress, show, table

ROOT = Path(__file__).resolve().parents[2]
HAND = Path(__file__).with_name("hand_loop.py")
TINY = Path(__file__).with_name("tiny_step.py")
# Steps per sample; the first window warms up.
WINDOW = 10
SMALL = ["model.model_dim=256", "model.num_layers=4", "dataset.sequence_length=128"]
SMALL += ["training.batch_size=4", "training.max_steps=60", "dataset.kind=synthetic"]
GPU = ["model.model_dim=2048", "model.num_layers=8", "model.num_heads=16"]
GPU += ["dataset.sequence_length=2048", "training.batch_size=4", "training.max_steps=60"]
GPU += ["training.mixed_precision=bf16", "compile.enabled=true", "dataset.kind=synthetic"]
# Enough state to make a save noticeable: 25 million parameters are 300 MB with AdamW's moments.
LARGE = ["model.model_dim=512", "model.num_layers=8", "dataset.sequence_length=32"]
LARGE += ["training.batch_size=1", "training.max_steps=36", "dataset.kind=synthetic"]
LARGE += ["checkpoint.at_end=false"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine.")
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = machine(Path(sys.executable))
    with tempfile.TemporaryDirectory() as place:
        steps = step_times(options.ranks, options.repeat, Path(place))
        saves = save_times(options.ranks, options.repeat, Path(place))
    ratio = steps["engine"] / steps["hand-written loop"]
    rows = [
        [name, f"{ms:.1f} ms", f"{ms / steps['hand-written loop']:.3f}"]
        for name, ms in steps.items()
    ]
    text = table(["one step", "median", "of the loop's"], rows)
    host = host_times(options.repeat)
    base = host["hand-written loop"]
    rows = [[name, f"{ms:.2f} ms", f"{ms / base:.2f}"] for name, ms in host.items()]
    text += "\n\n" + table(["a step of a tiny model", "the host computes", "of the loop's"], rows)
    stall = saves["asynchronous"]["stall"] / saves["synchronous"]["stall"]
    rows = [
        [how, f"{found['stall']:.0f} ms", f"{found['step']:.1f} ms", f"{found['mb']:,.0f} MB"]
        for how, found in saves.items()
        if how != "resume"
    ]
    text += "\n\n" + table(["saving every 5 steps", "training waits", "a step takes", "size"], rows)
    text += f"\n\nasynchronous stall / synchronous stall: {stall:.3f}"
    text += f"\nto resume (verify and read): {saves['resume']['stall']:.2f} s"
    data = {"steps": steps, "host": host, "ratio": ratio, "saves": saves, "stall": stall}
    show(options.json, f"The engine on {options.ranks} ranks", about, text, data)


# -- a step ---------------------------------------------------------------------------------------


def step_times(ranks: int, repeat: int, place: Path) -> dict[str, float]:
    config = GPU if torch.cuda.is_available() else SMALL
    found: dict[str, list[float]] = {"hand-written loop": [], "engine": []}
    for turn in range(repeat):
        progress(f"steps, turn {turn + 1} of {repeat}")
        said = torchrun(ranks, [str(HAND), *sets(config)])
        seconds = json.loads(said.strip().splitlines()[-1])
        windows = [seconds[i : i + WINDOW] for i in range(WINDOW, len(seconds), WINDOW)]
        found["hand-written loop"] += [1e3 * statistics.fmean(window) for window in windows]
        lines, _ = engine(ranks, config, place / "steps")
        found["engine"] += [line["step_ms"] for line in lines if line["step"] > WINDOW]
    return {name: statistics.median(values) for name, values in found.items()}


def host_times(repeat: int) -> dict[str, float]:
    """Return the processor time of a step, for all trainers that are installed.

    A tenth of the windows is quicker, so it contains little of the machine's other work.
    """
    progress("steps of a tiny model")
    words = [sys.executable, str(TINY), "--repeat", str(repeat)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: sorted(ms)[len(ms) // 10] for name, ms in found.items() if ms}


# -- a save ---------------------------------------------------------------------------------------


def save_times(ranks: int, repeat: int, place: Path) -> dict[str, dict[str, float]]:
    each: dict[str, list[tuple[float, float, float]]] = {}
    resumes = []
    for turn in range(repeat):
        progress(f"saves, turn {turn + 1} of {repeat}")
        for how in ("none", "synchronous", "asynchronous"):
            config = [*LARGE, f"checkpoint.asynchronous={str(how == 'asynchronous').lower()}"]
            config += ["checkpoint.steps=5"] if how != "none" else []
            config += ["logging.interval=1", f"checkpoint.directory={place / how}"]
            lines, said = engine(ranks, config, place / "saves")
            # The first save allocates the memory that the others reuse.
            stalls = [float(ms.replace(",", "")) for ms in re.findall(r"waited ([\d,]+) ms", said)]
            sizes = [
                float(number) * {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]
                for number, unit in re.findall(r"saved step \d+: ([\d.]+) ([kMG]?B) in", said)
            ]
            step = statistics.median(line["step_ms"] for line in lines[6:])
            stall = statistics.median(stalls[1:]) if stalls else 0.0
            each.setdefault(how, []).append((stall, step, sizes[-1] if sizes else 0.0))
        config = [*LARGE, "checkpoint.resume=auto", f"checkpoint.directory={place / how}"]
        _, said = engine(ranks, config, place / "resumed")
        resumes += [float(s) for s in re.findall(r"verified and read in ([\d.]+) s", said)]
        for how in each:
            shutil.rmtree(place / how, ignore_errors=True)
    saves = {
        how: dict(
            zip(
                ("stall", "step", "mb"),
                map(statistics.median, zip(*rows, strict=True)),
                strict=True,
            )
        )
        for how, rows in each.items()
    }
    return {**saves, "resume": {"stall": statistics.median(resumes), "step": 0.0, "mb": 0.0}}


# -- running --------------------------------------------------------------------------------------


def engine(ranks: int, config: Sequence[str], place: Path) -> tuple[list[dict[str, Any]], str]:
    """Run the engine; return the metrics of rank 0 and its output."""
    shutil.rmtree(place, ignore_errors=True)
    words = ["-m", "orchestrator.engine.train", *sets(config)]
    said = torchrun(ranks, words, ORCHESTRATOR_EXPERIMENT=str(place))
    metrics = place / "outputs/rank_00_metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "step_ms" in line], said


def sets(config: Sequence[str]) -> list[str]:
    return [word for value in config for word in ("--set", value)]


def torchrun(ranks: int, words: Sequence[str], **env: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *words]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        command, env=shared, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
