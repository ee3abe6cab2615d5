"""Launchers of others in the place of the program."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.plan.accelerate import refuse


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("torchrun train.py --lr 1", "train.py --lr 1"),
        (
            "torchrun --nnodes=2 --nproc_per_node=4 --standalone train.py -m",
            "--nproc 4 train.py -m",
        ),
        ("torchrun --nproc-per-node gpu -m pkg.train --x", "-m pkg.train --x"),
        ("venv/bin/torchrun --max-restarts 3 train.py", "--max-restarts 3 train.py"),
        ("python3 -m torch.distributed.run --nproc_per_node 2 t.py", "--nproc 2 t.py"),
        ("accelerate launch --config_file a.yaml t.py", "--accelerate-config a.yaml t.py"),
        ("accelerate launch --multi_gpu --num_processes 4 t.py", "t.py"),
        ("deepspeed --num_gpus 2 --hostfile hosts t.py --deepspeed", "--nproc 2 t.py --deepspeed"),
        ("composer -n 2 t.py", "--nproc 2 t.py"),
        ("mpirun -np 4 -x A=1 python -u t.py -u", "--env A=1 t.py -u"),
        ("mpirun -np 4 python -m pkg.train", "-m pkg.train"),
        ("fabric run --devices=2 --num-nodes 2 t.py", "t.py"),
        ("tune run --nproc_per_node 2 full --config c", "--nproc 2 tune run full --config c"),
        ("trl sft --model_name_or_path m", "-m trl.scripts.sft --model_name_or_path m"),
    ],
)
def test_a_launcher_of_others_is_answered_with_what_to_type(typed: str, instead: str) -> None:
    with pytest.raises(UsageError) as error:
        refuse(shlex.split(typed))
    assert error.value.fix == f"type: master_launch {instead}"


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
        "",
    ],
)
def test_what_starts_no_ranks_is_a_program(typed: str) -> None:
    refuse(shlex.split(typed))


def test_a_file_with_such_a_name_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "composer").touch()
    refuse(["composer", "-n", "2"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/torchrun").touch()
    with pytest.raises(UsageError):
        refuse(["bin/torchrun", "train.py"])
