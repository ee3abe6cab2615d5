"""accelerate: real `accelerate launch` on two nodes, by us and by hand with the files we write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.clusters.slurm import free_ports
from tests.launching import BIN, Command, Head

# As a tutorial has it, but for `accelerator.state.machine_rank` and `num_machines`: no version of
# accelerate that we know has these.
VERIFY = """
import os
from accelerate import Accelerator
import torch

accelerator = Accelerator()

# Print process information
print(f"Rank {accelerator.process_index}/{accelerator.num_processes} "
      f"on node {os.environ['NODE_RANK']}/{os.environ['NNODES']}")

# Test all-reduce
tensor = torch.tensor([accelerator.process_index], dtype=torch.float32, device=accelerator.device)
accelerator.print(f"Before all-reduce: {tensor.item()}")

# Sum across all processes
torch.distributed.all_reduce(tensor)
accelerator.print(f"After all-reduce: {tensor.item()}")

expected_sum = sum(range(accelerator.num_processes))
assert tensor.item() == expected_sum, f"All-reduce failed! Got {tensor.item()}, not {expected_sum}"

accelerator.print("✅ Multi-node setup successful!")
"""
TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

def main():
    accelerator = Accelerator()
    if accelerator.is_main_process:
        print(f"Training on {accelerator.num_processes} in {accelerator.mixed_precision}")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 4)
    dataloader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    for epoch in range(3):
        model.train()
        for batch, labels in dataloader:
            loss = torch.nn.functional.mse_loss(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            print(f"Epoch {epoch}: Loss = {loss.item():.4f}")
    weight = accelerator.unwrap_model(model).weight.sum().item()
    print("batches", len(dataloader), "weight", weight, sys.argv[1:])

if __name__ == "__main__":
    main()
"""


BOTH = """
import runpy
for name in ("verify.py", "train.py"):
    runpy.run_path(name, run_name="__main__")
"""
# Without torch: quick.
TOLD = """
import os, sys
names = ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
print(*(os.environ[name] for name in names), sys.argv[1:])
"""


def config(directory: Path, **keys: object) -> str:
    """A file for node 1 of another network, for twice two processes."""
    known = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "machine_rank": 1,
        "num_machines": 2,
        "num_processes": 4,
        "main_process_port": free_ports(1)[0],
        "rdzv_backend": "c10d",
        "mixed_precision": "bf16",
        "same_network": True,
    }
    (directory / "a.yaml").write_text(yaml.safe_dump({**known, **keys}))
    return "a.yaml"


@pytest.mark.cluster
def test_one_file_starts_all_nodes_and_the_sum_is_right(head: Head) -> None:
    head.script("verify.py", VERIFY)
    head.script("train.py", TRAIN)
    both = head.script("both.py", BOTH)
    file = config(head.directory, num_processes=2)
    run = head.run("--accelerate-config", file, both, "two words")
    port = yaml.safe_load((head.directory / file).read_text())["main_process_port"]
    assert "2 ranks, master" in run.text and f":{port}, plain start" in run.text
    for rank in range(2):
        assert rf"node{rank} rank{rank} | Rank {rank}/2 on node {rank}/2" in run.text
    assert "rank0 | After all-reduce: 1.0" in run.text
    assert "Multi-node setup successful!" in run.text
    assert "rank0 | Training on 2 in bf16" in run.text
    assert "rank0 | Epoch 2: Loss = " in run.text
    ends = re.findall(r"(batches 4 weight .+ \['two words'\])", run.text)
    assert len(ends) == 2 and len(set(ends)) == 1, "all ranks have the same weights"
    kept = yaml.safe_load(head.node_file(0, "accelerate_node0.yaml").read_text())
    assert (kept["machine_rank"], kept["mixed_precision"]) == (0, "bf16")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({"num_processes": 8}, ["--nproc", "1"], "num_processes is 8 in a.yaml, but these 2 nodes"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_starts(
    head: Head, keys: dict[str, object], options: list[str], words: str
) -> None:
    file = config(head.directory, **keys)
    command = head.launch("--accelerate-config", file, *options, head.script("v.py", VERIFY))
    assert command.finish() == 3, command.text
    assert words in command.text
    assert not head.experiments


def by_hand(directory: Path, rank: int, *words: str, **env: str) -> Command:
    place = {"MASTER_ADDR": "127.0.0.1", "NNODES": "2"}
    home = {"ORCHESTRATOR_HOME": str(directory / "home")}
    return Command(
        [str(BIN / "orchestrator"), "run-node", *words],
        directory,
        {**place, **home, "NODE_RANK": str(rank), **env},
    )


@pytest.mark.slow
def test_by_hand_the_nodes_start_by_accelerate_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOLD)
    file = config(tmp_path, machine_rank=0, num_processes=2)
    words = ("--accelerate-config", file, "train.py", "-x")
    both = [by_hand(tmp_path, rank, *words) for rank in (0, 1)]
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text
    for rank in (0, 1):
        assert f"rank{rank} | {rank} 2 bf16 true ['-x']" in both[rank].text


@pytest.mark.slow
def test_what_node_0_refuses_is_told_to_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOLD)
    file = config(tmp_path, machine_rank=0, num_processes=4)
    words = ("--nproc", "1", "--accelerate-config", file, "train.py")
    both = [by_hand(tmp_path, rank, *words) for rank in (0, 1)]
    assert [one.finish() for one in both] == [3, 3], both[0].text + both[1].text
    for one in both:
        assert "num_processes is 4 in a.yaml, but these 2 nodes run 2 ranks" in one.text
    assert "error: node 0 (" in both[1].text
    assert not list(tmp_path.glob("experiments/*"))
