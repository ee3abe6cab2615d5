"""The job of launch.py, the same for every launcher: records the time of each step and ends."""

import json
import os
import sys
import time


def main(directory: str, lasts: str = "0") -> None:
    """Write the time of day after each step to `rank_<N>.json` in the directory."""
    times = {"program": time.time()}
    import torch
    import torch.distributed as dist

    times["torch"] = time.time()
    # torchrunx has initialized it already.
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    times["group"] = time.time()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    times["all_reduce"] = time.time()
    assert ones.item() == dist.get_world_size()
    path = os.path.join(directory, f"rank_{dist.get_rank()}.json")  # noqa: PTH118
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123
        json.dump(times, file)
    dist.destroy_process_group()
    # Keeps the processes alive, as a training does.
    time.sleep(float(lasts))


if __name__ == "__main__":
    main(*sys.argv[1:])
