"""accelerate: real `accelerate launch` on two nodes, by us and by hand with the files we write."""

from pathlib import Path

import pytest
import yaml

from tests.clusters.slurm import free_ports
from tests.launching import BIN, Command, Head

ROOT = Path(__file__).parents[2]
PROGRAM = f"""
import runpy, sys
found = runpy.run_path({str(ROOT / "scripts/examples/test_multinode.py")!r})
print("in", found["accelerator"].mixed_precision, sys.argv[1:])
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
def test_config_file_starts_all_nodes(head: Head) -> None:
    file = config(head.directory, num_processes=2)
    program = head.script("program.py", PROGRAM)
    run = head.run("--accelerate-config", file, program, "two words")
    port = yaml.safe_load((head.directory / file).read_text())["main_process_port"]
    assert "2 ranks, master" in run.text and f":{port}, plain start" in run.text
    for rank in range(2):
        assert rf"node{rank} rank{rank} | Rank {rank}/2 on node {rank}/2" in run.text
    assert "rank0 | After all-reduce: 1.0" in run.text
    assert "Multi-node setup successful!" in run.text
    assert run.text.count("in bf16 ['two words']") == 2
    kept = yaml.safe_load(head.node_file(0, "accelerate_node0.yaml").read_text())
    assert (kept["machine_rank"], kept["mixed_precision"]) == (0, "bf16")


def by_hand(directory: Path, rank: int, *words: str, nnodes: str = "2") -> Command:
    place = {"MASTER_ADDR": "127.0.0.1", "NNODES": nnodes}
    home = {"ORCHESTRATOR_HOME": str(directory / "home")}
    return Command(
        [str(BIN / "orchestrator"), "run-node", *words],
        directory,
        {**place, **home, "NODE_RANK": str(rank)},
    )


@pytest.mark.slow
def test_run_node_starts_accelerate(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOLD)
    file = config(tmp_path, machine_rank=0, num_machines=1, num_processes=2)
    command = by_hand(tmp_path, 0, "--accelerate-config", file, "train.py", "-x", nnodes="1")
    assert command.finish() == 0, command.text
    for rank in (0, 1):
        assert f"rank{rank} | {rank} 2 bf16 true ['-x']" in command.text


@pytest.mark.slow
def test_refusal_of_node_0_reaches_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOLD)
    file = config(tmp_path, machine_rank=0, num_processes=4)
    words = ("--nproc", "1", "--accelerate-config", file, "train.py")
    both = [by_hand(tmp_path, rank, *words) for rank in (0, 1)]
    assert [one.finish() for one in both] == [3, 3], both[0].text + both[1].text
    for one in both:
        assert "num_processes is 4 in a.yaml, but these 2 nodes run 2 ranks" in one.text
    assert "error: node 0 (" in both[1].text
    assert not list(tmp_path.glob("experiments/[!.]*"))
