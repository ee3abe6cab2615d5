"""The job of warm.py --step: what every training script does until its first optimizer step."""

import json
import os
import sys
import time


def main(directory: str, lasts: str = "0") -> None:
    """Write the time of day after each step to `rank_<N>.json` in the directory."""
    times = {"program": time.time()}
    import torch
    import torch.distributed as dist
    from torch import nn, optim

    dist.init_process_group("gloo")
    times["group"] = time.time()
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    dist.barrier()
    times["step"] = time.time()
    path = os.path.join(directory, f"rank_{dist.get_rank()}.json")  # noqa: PTH118
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123
        json.dump(times, file)
    # The model first: DDP's reducer would free gloo's group, whose destructor can wait for ever
    # for a thread that wants the interpreter.
    del model
    dist.destroy_process_group()
    # Keeps the processes alive, as a training does.
    time.sleep(float(lasts))


if __name__ == "__main__":
    main(*sys.argv[1:])
