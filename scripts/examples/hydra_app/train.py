r"""Train what a Hydra config says, with DDP; rank 0 saves into Hydra's own directory.

master_launch --max-restarts 3 scripts/examples/hydra_app/train.py model=large lr=0.003 \
    'hydra.run.dir=${oc.env:ORCHESTRATOR_EXPERIMENT}/outputs/run'
"""

from __future__ import annotations

import os
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank = dist.get_rank()
    torch.manual_seed(config.seed)
    plain = nn.Sequential(
        nn.Linear(16, config.model.width), nn.ReLU(), nn.Linear(config.model.width, 1)
    ).to(device)
    model = DDP(plain)
    optimizer = instantiate(config.optimizer, model.parameters())
    # One directory for all attempts, as the command names it.
    checkpoint = Path(HydraConfig.get().runtime.output_dir) / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"rank {rank} resumes after step {first}")
    for step in range(first + 1, config.steps + 1):
        # The batch of a step is drawn by its number and the rank: a step that is done again
        # has the same one.
        draw = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        inputs = torch.randn(config.batch_size, 16, generator=draw).to(device)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % config.save_every == 0:
            print(f"step {step}/{config.steps} loss {loss:.6f}")
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    # Right behind an all-reduce, the end of a gloo group can wait for ever for its own thread.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
