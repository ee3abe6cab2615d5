"""The job of faults.py, the same for every launcher: all-reduces until it is ended.

Each rank holds a lock on its file while it lives, which any process on this machine can check.
Rank 1 kills itself when the file `die` appears; with `plain`, ranks use no torch and only wait.
"""

import fcntl
import os
import signal
import sys
import time


def main(directory: str, plain: bool = False) -> None:
    rank = int(os.environ["RANK"])
    lock = open(os.path.join(directory, f"alive_{rank}"), "w")  # noqa: SIM115, PTH118, PTH123
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not plain:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
    print(f"ready {rank}", flush=True)
    open(os.path.join(directory, f"ready_{rank}"), "w").close()  # noqa: PTH118, PTH123
    dies = os.path.join(directory, "die")  # noqa: PTH118
    while True:
        if rank == 1 and os.path.exists(dies):  # noqa: PTH110
            os.kill(os.getpid(), signal.SIGKILL)
        if not plain:
            dist.all_reduce(torch.ones(1))
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], "plain" in sys.argv[2:])
