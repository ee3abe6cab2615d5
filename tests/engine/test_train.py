"""The engine: the same numbers on every mesh, a loss that falls, an end that all ranks share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator import config
from orchestrator.engine import data, model, train
from tests.launching import Head

SMALL: dict[str, dict[str, float]] = {
    "training": {"max_steps": 10, "batch_size": 8, "seq_len": 32, "log_every": 5},
    "model": {"num_layers": 2, "model_dim": 32, "num_heads": 4},
    "optimizer": {"lr": 0.01, "grad_clip": 0.5},
}


def run(directory: Path, *worlds: str, **training: int) -> dict[str, list[int]]:
    """Exit codes of all ranks of each world; batch_size is that of all ranks together."""
    config = {**SMALL, "training": {**SMALL["training"], **training}}
    words = [sys.executable, "-m", "tests.engine.worlds", str(directory), json.dumps(config)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*words, *worlds], cwd=root, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return {first: [int(code) for code in codes] for first, *codes in lines}


def metrics(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = directory / "outputs" / f"rank_{rank:02d}_metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(directory: Path, world: str, rank: int = 0) -> str:
    return (directory / world / f"out_{rank}").read_text()


def test_every_mesh_computes_the_same(tmp_path: Path) -> None:
    """One process, one node, hybrid over two nodes, full_shard: the batch is the same, so are all
    losses and the norm of the whole gradient, which is clipped in every step."""
    worlds = ["1", "2", "2,2", "2,2:full", "2,1:full"]
    codes = run(tmp_path, *worlds, batch_size=24, max_steps=6)
    assert {code for found in codes.values() for code in found} == {0}
    alone = metrics(tmp_path / "1")
    assert [step["step"] for step in alone] == [1, 2, 3, 4, 5, 6]
    assert min(step["grad_norm"] for step in alone) > 0.5
    for world, found in codes.items():
        for rank in range(len(found)):
            own = metrics(tmp_path / world, rank)
            for name in ("loss", "grad_norm"):
                expected = pytest.approx([step[name] for step in alone], abs=1e-5)
                assert [step[name] for step in own] == expected, (world, rank, name)
            assert [step["tokens"] for step in own] == [step["tokens"] for step in alone]
    assert "mesh replicate 1 x shard 2 on CPU over gloo" in told(tmp_path, "2")
    assert "mesh replicate 2 x shard 2 on CPU over gloo" in told(tmp_path, "2,2")
    assert "mesh shard 4 on CPU" in told(tmp_path, "2,2:full")


def test_it_computes_what_plain_pytorch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, "2", max_steps=6) == {"2": [0, 0]}
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    whole = config.build(config.Config, SMALL, "")
    text = torch.frombuffer(bytearray(data.library_text()), dtype=torch.uint8)
    plain = model.Decoder(whole.model)
    model.initialise(plain, whole.model, seed=0)
    adamw = torch.optim.AdamW(plain.parameters(), weight_decay=0.01)
    for step, found in enumerate(metrics(tmp_path / "2"), start=1):
        adamw.param_groups[0]["lr"] = found["lr"]
        adamw.zero_grad()
        loss = plain(*data.batch(text, step, whole.training))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        assert found["loss"] == pytest.approx(loss.item(), abs=1e-5), step
        assert found["grad_norm"] == pytest.approx(norm.item(), abs=1e-5), step


def test_two_ranks_learn(tmp_path: Path) -> None:
    assert run(tmp_path, "2", max_steps=40) == {"2": [0, 0]}
    losses = [step["loss"] for step in metrics(tmp_path / "2")]
    assert losses[0] == pytest.approx(5.55, abs=0.15)  # ln 256: it knows nothing yet
    assert sum(losses[-5:]) / 5 < 3.7
    said = told(tmp_path, "2").splitlines()
    assert said[2].startswith("step  1/40  loss 5.")
    assert said[-1].startswith("step 40/40  loss ")
    assert len(said) == 2 + 9  # mesh and size; steps 1, 5, 10, ... 40
    assert all(line.endswith(" left") for line in said[3:-1])
    assert told(tmp_path, "2", 1) == ""


def test_one_rank_is_asked_to_stop_and_all_stop_after_the_same_step(tmp_path: Path) -> None:
    assert run(tmp_path, "2,2:stop", max_steps=100000) == {"2,2:stop": [0, 0, 0, 0]}
    counts = {len(metrics(tmp_path / "2,2:stop", rank)) for rank in range(4)}
    assert len(counts) == 1
    last = f"asked to stop: all ranks end together after step {counts.pop()}\n"
    assert told(tmp_path, "2,2:stop").endswith(last)


def test_hybrid_shard_refuses_nodes_of_unequal_size(tmp_path: Path) -> None:
    """All ranks refuse, also those of a node whose size would have fitted."""
    assert run(tmp_path, "1,2,3") == {"1,2,3": [1] * 6}
    for rank in range(6):
        words = "same number of ranks on every node; here 3 nodes have 6 together and up to 3 each"
        assert words in told(tmp_path, "1,2,3", rank)


def test_ctrl_c_ends_a_launched_engine_after_a_whole_step(head: Head) -> None:
    command = head.launch("--nproc", "2", "--set", "training.max_steps=100000")
    command.wait_for(r"node0 rank0 \| mesh replicate 2 x shard 2")
    command.wait_for(r"step +10/100000")
    command.interrupt()
    assert command.finish() == 130
    assert "asked to stop: all ranks end together" in command.text
    assert head.record["state"] == "stopped"
    ends = [rank["code"] for node in head.record["nodes"] for rank in node["ranks"].values()]
    assert ends == [0, 0, 0, 0]
    assert len({len(metrics(head.experiment, rank)) for rank in range(4)}) == 1
    assert head.nothing_left()


def test_by_hand_it_reads_a_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("training: {max_steps: 7}\n")
    monkeypatch.delenv("ORCHESTRATOR_RUN", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(file)])
    assert train.read_config().training.max_steps == 7
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train.read_config().training.max_steps == 100


def test_training_goes_on_where_metrics_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_EXPERIMENT", "/proc/none")
    with train.metrics_file(3) as file:
        assert file is None
    words = "no metrics of rank 3: /proc/none/outputs/rank_03_metrics.jsonl: No such file"
    assert words in capfd.readouterr().err


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    rates = [train.learning_rate(step, 100, 1.0) for step in range(1, 101)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert train.learning_rate(1, 1, 1.0) == 1.0
