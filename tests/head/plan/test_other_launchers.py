"""Launchers of others in the place of the program."""

import shlex
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.plan.other_launchers import refuse_launchers, refuse_script
from tests.typed import typed


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("torchrun train.py --lr 1", "train.py"),
        ("torchrun --nnodes=2 --nproc_per_node=4 --standalone train.py -m", "train.py"),
        ("torchrun --nproc-per-node gpu -m pkg.train --x", "-m pkg.train"),
        ("venv/bin/torchrun --max-restarts 3 train.py", "train.py"),
        ("python3 -m torch.distributed.run --nproc_per_node 2 t.py", "t.py"),
        ("accelerate launch --config_file a.yaml t.py", "t.py"),
        ("deepspeed --num_gpus 2 --hostfile hosts t.py --deepspeed", "t.py"),
        ("composer -n 2 t.py", "t.py"),
        ("mpirun -np 4 -x A=1 python -u t.py -u", "t.py"),
        ("mpirun -np 4 python -m pkg.train", "-m pkg.train"),
        ("mpirun ./simulate", "PROGRAM"),
        ("fabric run --devices=2 --num-nodes 2 t.py", "t.py"),
        ("tune run --nproc_per_node 2 full --config c", "PROGRAM"),
        ("trl sft --model_name_or_path m", "PROGRAM"),
        ("torchrun", "PROGRAM"),
    ],
)
def test_refuse_names_the_program_behind_another_launcher(typed: str, instead: str) -> None:
    with pytest.raises(UsageError, match="starts ranks by itself") as error:
        refuse_launchers(shlex.split(typed))
    assert error.value.fix == f"type: master_launch {instead} ...; its options: docs/coming-from"


@pytest.mark.parametrize(
    "typed",
    [
        "train.py torchrun",
        "python train.py",
        "python -m pkg.train",
        "tune run full --config c",
        "accelerate config",
        "trl env",
        "fabric deploy",
        "litgpt pretrain m",
        "uv run --no-project train.py",
        "torchrunner train.py",
        "",
    ],
)
def test_refuse_accepts_program_that_starts_no_ranks(typed: str) -> None:
    refuse_launchers(shlex.split(typed))


def test_refuse_accepts_users_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "composer").touch()
    refuse_launchers(["composer", "-n", "2"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/torchrun").touch()
    with pytest.raises(UsageError):
        refuse_launchers(["bin/torchrun", "train.py"])


@pytest.mark.parametrize(
    "words",
    [
        ("srun", "python", "train.py"),
        ("sbatch", "job.slurm"),
        ("lightning", "run", "model", "train.py"),
        ("ray", "start", "--head"),
    ],
)
def test_refuse_names_program_without_ranks(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=words[0]):
        refuse_launchers(words)


@pytest.mark.parametrize(
    ("text", "command", "typed"),
    [
        ("torchrun --nproc_per_node=2 train.py --lr 1 \"$@\"", "run.sh --x 3",
         "master_launch train.py ... "),
        ("set -e\nNCCL_DEBUG=INFO python -m torch.distributed.launch \\\n  --nproc_per_node 2 a.py",
         "bash run.sh", "master_launch a.py ... "),
        ("exec accelerate launch --num_processes 4 a.py 2>&1 | tee log", "./run.sh",
         "master_launch a.py ... "),
        ("#!/usr/bin/env bash\nmpirun -np 4 ./sim > out", "run", "master_launch PROGRAM ... "),
        ("torchrun --nproc_per_node=${NGPU} -m pkg.train", "run.sh",
         "master_launch -m pkg.train ... "),
        ("# torchrun a.py\npip install deepspeed\npython train.py", "run.sh", ""),
        ("if false; then\n  torchrun a.py\nfi\npython a.py", "run.sh", ""),
        ("#!/usr/bin/python3\ntorchrun (1)", "run", ""),
    ],
)  # fmt: skip
def test_refuse_script_names_launcher_inside(
    text: str, command: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.sh", "run"):
        (tmp_path / name).write_text(text + "\n")
    if not typed:
        refuse_script(command.split())
        return
    with pytest.raises(UsageError) as refused:
        refuse_script(command.split())
    assert f"type: {typed}" in str(refused.value) + " "
    assert f"master_launch --no-torchrun {command}" in str(refused.value)


def test_refuse_names_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON it would be a Python program that does nothing, and ends well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.ipynb").write_text('{"cells": []}')
    with pytest.raises(UsageError, match="is a notebook, not a program"):
        refuse_launchers(["train.ipynb"])


def test_launch_refuses_syntax_error_before_asking_nodes(tmp_path: Path) -> None:
    """There is no node list here: the script is read first, and --check none passes it by."""
    (tmp_path / "train.py").write_text("import os\nloss = model(x\n")
    code, _, text = typed(["launch", "train.py"], tmp_path)
    assert code == 2
    assert text.startswith("error: train.py:2: '(' was never closed\n    loss = model(x\n")
    assert "--check none leaves it to them" in text
    assert "there is no node list" in typed(["launch", "--check=none", "train.py"], tmp_path)[2]
    (tmp_path / "train.py").write_text("print('\\d')\n")
    assert "Syntax" not in typed(["launch", "train.py"], tmp_path)[2]
