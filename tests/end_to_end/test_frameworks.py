"""Third-party programs find their ranks by themselves, as they do under torchrun.

Their packages are installed for these tests alone, beside the torch that is here. DeepSpeed is not
among them: on two cores without a GPU its 0.19 gave no result within 400 s, not even under torchrun
alone.
"""

import re
import subprocess
import sys
import sysconfig
from importlib.metadata import version

import pytest

from tests.launching import Head

PACKAGES = ["lightning", "transformers[torch]"]
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
    report_to=[], use_cpu=True, save_strategy="no", ddp_backend="gloo")
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
PROGRAMS = {"Trainer of transformers": (TRAINER, ["out"]), "lightning": (LIGHTNING, [])}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the packages, and with all that ours has."""
    directory = tmp_path_factory.mktemp("frameworks")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (packages,) = directory.glob("lib/python3*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (directory / "constraints").write_text(f"torch=={version('torch')}\n")
    words = [sys.executable, "-m", "pip", "--python", str(directory / "bin/python"), "install"]
    options = ["-q", "--no-compile", "-c", str(directory / "constraints")]
    done = subprocess.run(
        [*words, *options, *PACKAGES], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the packages cannot be installed: {done.stderr.strip()[-300:]}")
    return str(directory / "bin" / "python")


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_of_framework_runs(head: Head, python: str, name: str) -> None:
    """Its ranks are one group: what they average is the same on both, and they count two."""
    source, args = PROGRAMS[name]
    words = [head.script("program.py", source), *args]
    command = head.launch("--nproc", "1", "--python", python, *words)
    assert command.finish(SECONDS) == 0, command.text
    logs = [head.log(node).decode() for node in (0, 1)]
    found = [re.findall(r"RESULT (\d\.\d{6}) of (\d)", log) for log in logs]
    assert found[0] == found[1] and [world for _, world in found[0]] == ["2"], logs
    assert head.nothing_left()
