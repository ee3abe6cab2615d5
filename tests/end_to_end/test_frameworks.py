"""Third-party programs behave under us as they do under torchrun typed by hand.

Their packages are installed for these tests alone, beside the torch that is here. DeepSpeed is not
among them: on two cores without a GPU its 0.19 gave no result within 400 s, not even under torchrun
alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import Cluster
from tests.launching import Head

pytestmark = pytest.mark.cluster

PACKAGES = [
    "hydra-core",
    "lightning",
    "mlflow-skinny",
    "tensorboard",
    "tqdm",
    "transformers[torch]",
]
# One program, importing included, may take this long on a busy machine.
SECONDS = 400.0

TRAINER = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
set_seed(0)
shape = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
model = GPT2LMHeadModel(GPT2Config(**shape))
rows = [torch.randint(0, 32, (16,)) for _ in range(32)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=4, per_device_train_batch_size=2, logging_steps=1,
    report_to=["tensorboard"], use_cpu=True, save_strategy="no", ddp_backend="gloo")
data = [{"input_ids": row, "labels": row} for row in rows]
done = Trainer(model, arguments, train_dataset=data).train()
print(f"RESULT {done.training_loss:.6f} of {arguments.world_size}")
"""
LIGHTNING = """
import os, lightning, torch
from torch.utils.data import DataLoader, TensorDataset
lightning.seed_everything(0)
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        loss = (self.layer(batch[0]) ** 2).mean()
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=2, strategy="ddp",
    max_steps=4, logger=False, enable_checkpointing=False)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=2))
print(f"RESULT {trainer.callback_metrics['loss']:.6f} of {trainer.world_size}")
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
set_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.utils.data.TensorDataset(torch.randn(32, 4))
data = torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (batch,) in data:
    loss = (model(batch) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"RESULT {accelerator.reduce(loss, 'mean').item():.6f} of {accelerator.num_processes}")
"""
HYDRA = """
import os, hydra, torch, torch.distributed as dist
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    dist.init_process_group("gloo")
    total = torch.tensor(config.lr)
    dist.all_reduce(total)
    print(f"RESULT {total.item():.6f} {config.where} {os.getcwd()} {config.odd!r}")
    dist.destroy_process_group()
    if "fails" in config:
        raise SystemExit(3)
main()
"""
WRITERS = """
import os, sys, mlflow, torch, torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
dist.init_process_group("gloo")
total = torch.zeros(1)
for _ in tqdm(range(20), desc="steps"):
    total += 1
for _ in track(range(5), console=Console(file=sys.stderr, force_terminal=True, width=60)):
    total += 1
dist.all_reduce(total)
print(f"RESULT {total.item():.6f} of {dist.get_world_size()}")
if dist.get_rank() == 0:  # nothing is closed: that is left to atexit
    SummaryWriter(os.path.join(sys.argv[1], "tensorboard")).add_scalar("total", total.item(), 1)
    mlflow.set_tracking_uri("file:" + os.path.abspath(sys.argv[1]) + "/mlruns")
    mlflow.start_run()
    mlflow.log_metric("total", total.item())
"""
PROGRAMS = {
    "Trainer of transformers": (TRAINER, ["out"], 0),
    "lightning": (LIGHTNING, [], 0),
    "accelerate": (ACCELERATE, [], 0),
    "hydra": (HYDRA, ["+odd='a b'"], 0),
    "hydra that fails": (HYDRA, ["+odd=1", "+fails=1"], 1),
    "bars and writers": (WRITERS, ["out"], 0),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the packages, and with all that ours has."""
    directory = tmp_path_factory.mktemp("frameworks")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (packages,) = directory.glob("lib/python3*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (directory / "constraints").write_text(f"torch=={pytest.importorskip('torch').__version__}\n")
    words = [sys.executable, "-m", "pip", "--python", str(directory / "bin/python"), "install"]
    constraints = ["-q", "-c", str(directory / "constraints")]
    done = subprocess.run(
        [*words, *constraints, *PACKAGES], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the packages cannot be installed: {done.stderr.strip()[-300:]}")
    return str(directory / "bin" / "python")


def results(text: str) -> list[str]:
    """Return the ranks' results; two ranks may share a line under torchrun typed by hand."""
    return sorted(found.rstrip() for found in re.findall(r"RESULT (?:(?!RESULT).)*", text))


def by_hand(cluster: Cluster, head: Head, python: str, words: list[str]) -> tuple[int, list[str]]:
    """The exit code and the results of torchrun, typed on both nodes at once."""

    def typed(node: int) -> tuple[int, str]:
        torchrun = (
            f"{python} -m torch.distributed.run --nnodes 2 --node-rank {node} --nproc-per-node 2"
            f" --master-addr {cluster.addresses[0]} --master-port 29777"
        )
        # A failure on one node would leave the other's ranks waiting for ever.
        command = f"cd {head.directory} && export OMP_NUM_THREADS=1 MLFLOW_ALLOW_FILE_STORE=true"
        program = " ".join(f'"{word}"' for word in words)
        done = cluster.ssh(node, f"{command}; {torchrun} {program}", timeout=SECONDS)
        return done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(typed, (0, 1)))
    return max(code for code, _ in ends), results("".join(text for _, text in ends))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_somebody_else(two_nodes: Cluster, head: Head, python: str, name: str) -> None:
    source, args, code = PROGRAMS[name]
    (head.directory / "conf").mkdir()
    (head.directory / "conf/config.yaml").write_text("lr: 0.1\nwhere: ${oc.env:PWD}\n")
    words = [head.script("program.py", source), *args]
    wanted = by_hand(two_nodes, head, python, words)
    assert wanted[0] == code and len(wanted[1]) == 4, wanted
    options = ["--nproc", "2", "--python", python, "--env", "MLFLOW_ALLOW_FILE_STORE=true"]
    command = head.launch(*options, *words)
    ended = command.finish(SECONDS)
    logs = b"".join(head.log(node) for node in (0, 1)).decode()
    assert (ended, results(logs)) == wanted, command.text
    if "writers" in name:
        assert list(head.directory.glob("out/tensorboard/events.*"))
        assert len(list(head.directory.glob("out/mlruns/*/*/metrics/total"))) == 2
    assert head.nothing_left()
