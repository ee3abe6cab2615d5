"""The engine as people start it: master_launch on two nodes, by hand, by config."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from orchestrator.engine import train
from tests.engine.worlds import Job, run
from tests.launching import BIN, Command, Head, missing_lines

ROOT = Path(__file__).parents[2]


def last_step(directory: Path, rank: int) -> int:
    lines = (directory / "outputs" / f"rank_{rank:02d}_metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["step"])


def typed(head: Head, *words: str) -> Command:
    return Command([str(BIN / "orchestrator"), "checkpoint", *words], head.directory, {})


@pytest.mark.cluster
def test_ctrl_c_saves_and_resume_continues(head: Head) -> None:
    """Asked to stop, all ranks end after one step; the next launch begins with the one after, and
    the commands for checkpoints find what was saved. By the recipe of docs/recipes/engine.md."""
    recipe = ["--nproc", "1", "--config", str(ROOT / "scripts/examples/engine.yaml")]
    command = head.launch(*recipe, "--set", "training.max_steps=100000")
    command.wait_for(r"node0 rank0 \| hybrid_shard: 2 copies of the parameters, each in 1 shard")
    command.wait_for(r"step +10/100000")
    command.interrupt()
    assert command.finish() == 130
    first = head.experiment
    step = last_step(first, 0)
    assert {last_step(first, rank) for rank in range(2)} == {step}
    assert f"asked to stop (step {step})" in command.text
    assert head.record["state"] == "stopped"
    ends = [rank["code"] for node in head.record["nodes"] for rank in node["ranks"].values()]
    assert ends == [0, 0]
    assert head.nothing_left()

    steps = str(step + 5)
    second = head.run("--nnodes", "1", *recipe, "--set", f"training.max_steps={steps}")
    assert f"resuming after step {step}, from {first}" in second.text
    assert not missing_lines(ROOT / "docs/recipes/engine.md", command.text + second.text)
    assert last_step(head.experiment, 0) == step + 5

    listed = typed(head, "ls", "--json").ends()
    (found,) = json.loads(listed.text)["checkpoints"]
    assert (found["step"], found["world"]) == (step + 5, 1)
    # What lies in the user's own directory counts for nothing in an export.
    (head.directory / "torch.py").write_text("raise KeyError")
    out = str(head.directory / "model of mine.safetensors")
    typed(head, "export", head.experiment.name, out).ends()
    with safe_open(out, "pt") as file:
        assert "embedding.weight" in file.keys()  # noqa: SIM118  (it is no mapping)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ranking.yaml", "demo.yaml"])
def test_shipped_configs_run(tmp_path: Path, name: str) -> None:
    config = yaml.safe_load((ROOT / "config" / name).read_text())
    config["training"]["max_steps"] = 3
    job = Job(str(tmp_path), [1, 1], {**config, "logging": {"interval": 1}})
    assert run(job) == [[0, 0]], job.output()
    assert "step 3/3" in job.output()


def test_read_config_reads_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("training: {max_steps: 7}\n")
    monkeypatch.delenv("ORCHESTRATOR_RUN", raising=False)
    words = ["train.py", "--config", str(file), "--set", "training.seed=3"]
    monkeypatch.setattr(sys, "argv", words)
    assert (train.read_config().training.max_steps, train.read_config().training.seed) == (7, 3)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train.read_config().training.max_steps == 100


@pytest.mark.cluster
def test_documented_trainer_examples_run(head: Head) -> None:
    text = (ROOT / "docs/trainer.md").read_text(encoding="utf-8")
    example, gan, helpers = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    head.script("train.py", f"{example}\n{gan}\nloss = torch.tensor(2.0)\n{helpers}")
    alone = Command([sys.executable, "train.py"], head.directory, {}).ends()
    assert "one process on" in alone.text
    assert "training on 900 samples, shuffled by seed 0 and epoch\n" in alone.text
    both = head.run("--nproc", "1", "train.py")
    assert "ddp: a whole copy of the parameters on each of 2 ranks" in both.text
    assert "900 samples, shuffled by seed 0 and epoch, dealt out to 2 ranks" in both.text
    assert "3 epochs are done (step 45)" in both.text
    assert "tensor(2.) 2" in both.text
    lines = (head.experiment / "outputs/rank_00_metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if "val_accuracy" in line]
    assert found[-1]["val_accuracy"] > 0.8
    listed = typed(head, "ls", "--json").ends()
    saved = json.loads(listed.text)["checkpoints"]
    assert [(one["step"], one["world"]) for one in saved] == [(45, 2), (30, 2), (15, 2)]
