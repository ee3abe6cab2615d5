"""Three programs whose ranks do harm to themselves when a file says so: for recovery.py.

Each prints a line for every step, and writes the same into a directory that no fault reaches. So
it is known what a log should have, even if the node or its disks are lost.
"""

from __future__ import annotations

from typing import NamedTuple

SUFFERING = '''
"""The harm that ranks do to themselves: {control}/do_<rank> says what, and at which step."""

import json, os, signal, sys, time

CONTROL, RANK = os.environ["RECOVERY_CONTROL"], int(os.environ["RANK"])
said = open(f"{CONTROL}/said_{RANK}", "a", buffering=1)


def pace():
    with open(f"{CONTROL}/pace") as file:
        time.sleep(float(file.read() or 0))


def suffer(step):
    """Do what was ordered for this step, and return its name if the program goes on."""
    path = f"{CONTROL}/do_{RANK}"
    try:
        with open(path) as file:
            order = json.load(file)
    except FileNotFoundError:
        return ""
    if step < order["step"]:
        return ""
    if not order["always"]:
        os.remove(path)
    what = order["what"]
    if what == "raise":
        raise ValueError(f"bad sample at step {step}")
    if what == "exit 3":
        sys.exit(3)
    if what == "exit 0":
        os._exit(0)
    if what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        time.sleep(10000)
    if what == "memory":
        bytearray(256 << 20).replace(b"\\0", b"1")
    while what == "spin":
        pass
    return what


def tell(step, loss):
    print(f"step {step} loss {loss!r} rank {RANK}", flush=True)
    said.write(f"{step} {loss!r}\\n")


def digest(model):
    import hashlib

    parts = [getattr(part, "to_local", lambda part=part: part)() for part in model.parameters()]
    whole = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts))
    with open(f"{CONTROL}/weights_{RANK}", "w") as file:
        file.write(whole.hexdigest())
'''

DDP = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from suffering import RANK, digest, pace, suffer, tell

steps = int(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
# One parameter: after each start DDP has several in another order for one step, and the sums of
# three ranks depend on their order.
model = nn.Linear(16, 4, bias=False)
ddp = nn.parallel.DistributedDataParallel(model)
optimizer, begun = torch.optim.AdamW(model.parameters(), lr=3e-3), 0
if os.path.exists("ckpt/last.pt"):
    saved = torch.load("ckpt/last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begun = saved["step"]
for step in range(begun + 1, steps + 1):
    pace()
    what = suffer(step)
    chance = torch.Generator().manual_seed(step * 1000 + RANK)
    x = torch.randn(8, 16, generator=chance)
    y = x[:, :4].sin() + x[:, 4:8]
    loss = (ddp(x) - y).square().mean()
    if what == "nan":
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    tell(step, (mean / dist.get_world_size()).item())
    if step % 5 == 0 and RANK == 0:
        os.makedirs("ckpt", exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, "ckpt/new.tmp")
        os.replace("ckpt/new.tmp", "ckpt/last.pt")
digest(model)
dist.barrier()
dist.destroy_process_group()
"""

TRAINER = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from orchestrator import Trainer
from suffering import digest, pace, suffer, tell

steps = int(sys.argv[1])


class Numbered(Dataset):
    def __len__(self):
        return steps * int(os.environ["WORLD_SIZE"]) * 2

    def __getitem__(self, number):
        x = torch.randn(16, generator=torch.Generator().manual_seed(number))
        return number, x, x[:4].sin() + x[4:8]


def step(model, batch):
    numbers, x, y = batch
    pace()
    what = suffer(trainer.state.step + 1)
    loss = (model(x) - y).square().mean()
    if what == "nan":
        loss = loss * float("nan")
    tell(trainer.state.step + 1, loss.item())
    return loss, len(numbers)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
config = {"checkpoint": {"memory_every": 1}, "logging": {"interval": 1}}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
trainer = Trainer(model, optimizer, step=step, strategy="full_shard", config=config)
loader = DataLoader(Numbered(), batch_size=2, shuffle=True)
trainer.train(loader, epochs=1, save_every="20 steps")
digest(model)
"""

ENGINE = """
import torch
from torch import nn
from suffering import pace, suffer, tell


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def loss(model, batch):
    x, y = batch["x"], batch["y"]
    pace()
    with torch.no_grad():
        model.steps += 1
    what = suffer(int(model.steps))
    total = (model(x) - y).square().sum()
    if what == "nan":
        total = total * float("nan")
    tell(int(model.steps), total.item())
    return total, y.numel()


def data(split):
    own = torch.Generator().manual_seed(len(split))
    rows = torch.randn(4000, 16, generator=own)
    return [{"x": x, "y": x[:4].sin() + x[4:8]} for x in rows]
"""

OF_ENGINE = [
    *("model.target=engine:Model", "training.loss=engine:loss", "dataset.target=engine:data"),
    *("logging.interval=1", "checkpoint.memory_every=1", "checkpoint.steps=20"),
    *("training.batch_size=2", "optimizer.lr=3.0e-3"),
]


class Program(NamedTuple):
    """A program of three: its files, how it is launched, and what of it comes home."""

    files: dict[str, str]
    # Set if the engine writes files of metrics.
    measures: bool
    # Set if a step is printed once all ranks have done their part in it.
    tells_last: bool = False

    def words(self, steps: int) -> list[str]:
        if "engine.py" not in self.files:
            return [next(iter(self.files)), str(steps)]
        settings = [*OF_ENGINE, f"training.max_steps={steps}"]
        return [word for setting in settings for word in ("--set", setting)]


PROGRAMS = {
    "engine": Program({"engine.py": ENGINE, "suffering.py": SUFFERING}, measures=True),
    "trainer": Program({"trainer.py": TRAINER, "suffering.py": SUFFERING}, measures=True),
    "ddp": Program({"ddp.py": DDP, "suffering.py": SUFFERING}, measures=False, tells_last=True),
}
