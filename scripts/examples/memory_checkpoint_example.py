"""Train with plain DDP, and go on after a restart from what the ranks kept in memory.

master_launch --max-restarts 3 scripts/examples/memory_checkpoint_example.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import orchestrator

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
if (state := orchestrator.load_memory_checkpoint(replicated=True)) is not None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 200:
    own = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(16, 8, generator=own)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    orchestrator.memory_checkpoint(state, replicated=True)
    if dist.get_rank() == 0 and step % 50 == 0:
        print(f"step {step}  loss {loss.item():.6f}")
dist.destroy_process_group()
