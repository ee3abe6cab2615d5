"""Nodes without a shared disk: what their ranks wrote comes home, what is too large is named."""

import json
import re
import signal
from typing import Any

from tests.launching import BIN, PATIENCE, Command, Head
from tests.node.running import wait_until

# A step takes 0.1 s, so that the job waits for the commands and does not only compute.
SLOW = """
import time
from torch import nn
from torch.utils.data import Dataset
from tests.node.running import wait_until

class Slow(Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        time.sleep(0.05)
        return {"x": float(index % 7)}

def data(split):
    return Slow()

def model():
    return nn.Linear(1, 1)

def loss(model, batch):
    x = batch["x"].float()[:, None]
    return model(x).square().sum(), len(x)
"""
ENDLESS = [
    *("model.target=slow:model", "dataset.target=slow:data", "training.loss=slow:loss"),
    *("logging.interval=1", "training.batch_size=2", "training.max_steps=100000"),
]


def test_metrics_traces_and_checkpoints_are_fetched(
    apart: Head,
) -> None:
    """All ranks trace the same steps, their traces are fetched, and the job continues."""
    apart.script("slow.py", SLOW)
    options = [word for key in ENDLESS for word in ("--set", key)]
    job = apart.launch("--nproc", "1", "--sync", "always", *options)
    job.wait_for(r"step +2\b")
    asked = apart.command("orchestrator", "profile", "--json", "--steps", "2").ends()
    found = json.loads(asked.text[asked.text.index("{\n") :])
    first = int(found["directory"].rpartition("_")[2])
    assert first > 2
    for rank in found["ranks"].values():
        assert rank["steps"] == 2 and rank["compute_ms"] > 0 and rank["communication_ms"] > 0
    place = apart.experiment / "outputs" / "profile" / f"step_{first:08d}"
    names = ["rank_00.json.gz", "rank_01.json.gz"]
    assert sorted(path.name for path in place.iterdir()) == names
    job.wait_for(rf"step +{first + 3}\b")
    apart.command("orchestrator", "stop").ends()
    job.finish()
    again = apart.command("orchestrator", "profile").ends()
    assert re.search(rf"is over: reading its traces in .*{place.name}", again.text)
    assert re.search(r"^ +0( +[0-9.]+){6}  host0", again.text, re.MULTILINE), again.text

    assert "node 1: its checkpoints stay on the node, in /" in job.text
    for rank in range(2):
        path = apart.experiment / "outputs" / f"rank_{rank:02d}_metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line["step"] for line in lines if "loss" in line]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > first
    name = apart.experiment.name
    apart.command("orchestrator", "pull", "--checkpoints", name).ends()
    verify = Command(
        [str(BIN / "orchestrator"), "checkpoint", "verify", name], apart.directory, {}
    ).ends()
    assert "step" in verify.text
    kept = apart.command("orchestrator", "pull", "--checkpoints", "--json", name).ends()
    assert [node["bytes"] for node in json.loads(kept.text)["nodes"]] == [0, 0]


PROGRAM = """
import os
place = os.path.join(os.environ["ORCHESTRATOR_EXPERIMENT"], "outputs")
rank = os.environ["RANK"]
os.makedirs(os.path.join(place, "a b", "c"))
with open(os.path.join(place, "a b", "c", f"it's {rank}.bin"), "wb") as file:
    file.write(bytes(range(256)) * 5000)
open(os.path.join(place, f"empty {rank}"), "w").close()
with open(os.path.join(place, f"large {rank}"), "wb") as file:
    file.truncate((64 << 20) + 1)
os.symlink("/etc/passwd", os.path.join(place, "link"))
os.makedirs("lightning_logs/version_0", exist_ok=True)
for name in (f"lightning_logs/version_0/{rank}.ckpt", "same.txt"):
    with open(name, "w") as file:
        file.write(rank)
open(os.path.expanduser("~/best.pt"), "w").close()
"""


def test_files_of_any_program_are_fetched(apart: Head) -> None:
    for node in range(2):
        text = f"cat > {apart.directory}/leaves.py <<'EOF'\n{PROGRAM}\nEOF\n"
        apart.cluster.exec(node, ["sh", "-c", text])
    apart.script("leaves.py", PROGRAM)
    command = apart.run("--no-torchrun", "leaves.py")
    place = apart.experiment / "outputs"
    found = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    # Only a longer job has these.
    found -= {"node_00_metrics.jsonl", "node_01_metrics.jsonl"}
    left = {"lightning_logs/version_0/0.ckpt", "lightning_logs/version_0/1.ckpt", "same.txt"}
    (aside,) = (f"node{rank}/same.txt" for rank in (0, 1) if f"node{rank}/same.txt" in found)
    # The node that came second has its file of the same name here.
    found.remove(aside)
    assert (place / aside).read_text() + (place / "same.txt").read_text() in ("01", "10")
    assert found == {"a b/c/it's 0.bin", "a b/c/it's 1.bin", "empty 0", "empty 1", *left}
    told = "the program wrote lightning_logs, same.txt beside its code on 2 nodes (4 files, 4 B)"
    assert f"{told}: now in {place}; for the next launch" in command.text
    stays = "outside its directory and $ORCHESTRATOR_EXPERIMENT/outputs stays on the nodes"
    assert command.text.count(stays) == 1
    assert (place / "a b/c/it's 1.bin").read_bytes() == bytes(range(256)) * 5000
    assert "node 1: large 1 (67.1 MB) stay on the node, in /" in command.text
    # A pull takes files of any size.
    assert apart.command("orchestrator", "pull", "--node", "1").finish() == 0
    assert (place / "large 1").stat().st_size == (64 << 20) + 1
    path = f"{apart.directory}/leaves.py"
    apart.command("orchestrator", "pull", path, "copies").ends()
    copies = sorted((apart.directory / "copies").glob("*/*"))
    assert [copy.read_text().strip() for copy in copies] == [PROGRAM.strip()] * 2
    assert [copy.parent.name for copy in copies] == [
        f"node_{i}_{address}" for i, address in enumerate(apart.cluster.addresses)
    ]
    assert apart.command("orchestrator", "pull", f"{path}.no", "copies").finish() == 1


WRITES = """
import json, os, time
place = os.path.join(os.environ["ORCHESTRATOR_EXPERIMENT"], "outputs")
rank = os.environ["RANK"]
for step in (1, 2, 3):
    for name in ("shared.csv", f"rank_{rank}.jsonl"):
        with open(os.path.join(place, name), "a") as file:
            file.write(json.dumps({"rank": rank, "step": step}) + "\\n")
    while not os.path.exists(f"step_{step}"):
        time.sleep(0.05)
"""


def test_metrics_grow_while_job_runs(apart: Head) -> None:
    """A new head continues them; a name that two nodes use stays the first one's. A script without
    the Trainer, as this one, has no step to profile and is told how to trace itself."""
    for node in range(2):
        text = f"cat > {apart.directory}/writes.py <<'EOF'\n{WRITES}\nEOF\n"
        apart.cluster.exec(node, ["sh", "-c", text])
    apart.script("writes.py", WRITES)

    def go_on(step: int) -> None:
        for node in range(2):
            apart.cluster.exec(node, ["touch", f"{apart.directory}/step_{step}"])

    def lines(rank: int) -> list[dict[str, Any]]:
        path = apart.experiment / "outputs" / f"rank_{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def until(steps: int) -> None:
        wait_until(lambda: all(len(lines(rank)) >= steps for rank in range(2)), patience=PATIENCE)

    head = apart.launch("--no-torchrun", "--sync", "off", "writes.py")
    head.wait_for("logs in")
    until(1)
    go_on(1)
    until(2)
    head.interrupt(signal.SIGKILL)
    head.finish()
    go_on(2)
    attached = apart.command("orchestrator", "attach")
    until(3)
    asked = apart.command("orchestrator", "profile", "--timeout", "1").ends(3)
    assert "no rank of this job has made a step with the Trainer" in asked.text
    assert "trace.step()  # after each training step" in asked.text
    go_on(3)
    assert attached.finish() == 0, attached.text
    assert [[line["step"] for line in lines(rank)] for rank in range(2)] == [[1, 2, 3]] * 2
    assert "shared.csv (another file has this name here)" in attached.text
    shared = (apart.experiment / "outputs/shared.csv").read_text().splitlines()
    assert [json.loads(line)["step"] for line in shared] == [1, 2, 3]
    assert len({json.loads(line)["rank"] for line in shared}) == 1


def test_printed_steps_are_in_report(head: Head) -> None:
    script = head.script(
        "prints.py", "for step in range(1, 6): print(f'step {step}/5 loss {1 / step:.3f}')"
    )
    head.run("--nnodes", "1", "--no-torchrun", script)
    [path] = (head.experiment / "printed").glob("*.jsonl")
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["steps"]) for line in told] == [(step, 5) for step in range(1, 6)]
    assert head.command("orchestrator", "report").finish() == 0
    page = (head.experiment / "report.html").read_text()
    assert "Loss over the steps. training: 1 at step 1, 0.2 at step 5" in page
