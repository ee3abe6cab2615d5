"""A loop of all-reduces in which one rank kills itself once; writes when, and the next step.

killed_once.py DIRECTORY SECONDS     (the first attempt runs so long, unless it is ended)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_SECONDS = 0.02


def main() -> None:
    out, alive = Path(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    again = (out / "killed").exists()
    (out / f"begun_{rank}").touch()
    end = time.monotonic() + alive
    while not again:
        dist.all_reduce(torch.ones(1))
        if rank == last and time.monotonic() > end:
            (out / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP_SECONDS)
    dist.all_reduce(torch.ones(1))
    (out / f"good_{rank}").write_text(str(time.time()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
