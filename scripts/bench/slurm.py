"""Measure from the command to the end of a first all-reduce, in an allocation of a real Slurm.

    .venv/bin/python scripts/bench/slurm.py [ROUNDS]

Compares `master_launch` (through srun) with what people write into batch files, `srun torchrun`,
and with `srun python`, which needs no torchrun; interleaved, medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.clusters.slurm import Slurm  # noqa: E402
from tests.free_ports import free_ports  # noqa: E402

BIN = Path(sys.executable).parent
SCRIPT = ROOT / "scripts/bench/first_all_reduce.py"
TORCHRUN = (
    f"exec {BIN}/torchrun --nnodes=2 --nproc-per-node=2 --node-rank=$SLURM_NODEID"
    f" --master-addr=127.0.0.1 --master-port=%d {SCRIPT} ."
)
RANK = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
    f" MASTER_ADDR=127.0.0.1 MASTER_PORT=%d; exec {BIN}/python {SCRIPT} ."
)


def contenders() -> dict[str, list[str]]:
    first, second = free_ports(2)
    step = ["srun", "--quiet", "--nodes=2"]
    return {
        "master_launch": [str(BIN / "master_launch"), "--quiet", "--nproc=2", str(SCRIPT), "."],
        "srun torchrun": [*step, "--ntasks-per-node=1", "sh", "-c", TORCHRUN % first],
        "srun python": [*step, "--ntasks-per-node=2", "--overcommit", "sh", "-c", RANK % second],
    }


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    took: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as place,
        Slurm(Path(place)) as slurm,
    ):
        slurm.run("salloc", "--no-shell", "--nodes=2", "--cpus-per-task=4")
        job = slurm.said("squeue", "-h", "-o", "%i")
        inside = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[1-2]", "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **slurm.env, **inside, "ORCHESTRATOR_HOME": f"{place}/home"}
        for _ in range(rounds):
            for name, words in contenders().items():
                began = time.monotonic()
                subprocess.run(words, env=env, cwd=place, check=True, capture_output=True)
                took.setdefault(name, []).append(time.monotonic() - began)
    for name, seconds in took.items():
        each = " ".join(f"{one:.2f}" for one in seconds)
        print(f"{name:14} {statistics.median(seconds):6.2f} s   ({each})")


if __name__ == "__main__":
    main()
