"""A job that fails is started again: the same losses, one log, and an end that is proved."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load
from tests.engine.worlds import Job, run
from tests.launching import Head

pytestmark = pytest.mark.cluster

SETTINGS = [
    *("training.max_steps=24", "checkpoint.steps=4", "logging.interval=1", "training.batch_size=2"),
    *("model.num_layers=1", "model.model_dim=16", "dataset.sequence_length=32"),
]
SETTINGS += ["checkpoint.memory_every=1", "fsdp.sharding_strategy=full_shard"]
ENGINE = ["--nproc", "1", *[word for value in SETTINGS for word in ("--set", value)]]

PROGRAM = """
import os, signal, sys, time, torch, torch.distributed as dist
import orchestrator
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["ORCHESTRATOR_ATTEMPT"])
kept = os.path.join(os.environ["ORCHESTRATOR_RESUME_DIR"], f"kept{rank}")
before = open(kept).read() if os.path.exists(kept) else "nothing"
print("attempt", attempt, "count", os.environ["TORCHELASTIC_RESTART_COUNT"], "kept", before)
with open(kept, "w") as file:
    file.write(f"by attempt {attempt}")
dist.barrier()
sys.stdout.write("half a line")
sys.stdout.flush()
if attempt == 2 and rank == 2 and sys.argv[1:] == ["refuses"]:
    raise orchestrator.NoRestart("the data are gone")
if sys.argv[1:] == ["stays"]:
    time.sleep(1000 if attempt > 1 or rank != 3 else 0)
if attempt == 1 and rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


@pytest.fixture
def apart(netns_cluster: Any, tmp_path: Path) -> Head:
    """Every host has a directory of its own where the head has its experiments."""
    return Head(netns_cluster(2, tmpfs=[str(tmp_path)]), tmp_path)


def losses(experiment: Path) -> list[list[tuple[int, float]]]:
    """The step and loss of each line of each rank's metrics."""
    files = sorted((experiment / "outputs").glob("rank_*_metrics.jsonl"))
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[(line["step"], line["loss"]) for line in rank if "loss" in line] for rank in lines]


def resume_dirs(head: Head) -> list[str]:
    words = ["sh", "-c", "ls -d /dev/shm/orchestrator-*/* 2>/dev/null || true"]
    return [line for i in (0, 1) for line in head.cluster.exec(i, words).split()]


def test_training_goes_on_as_if_nothing_had_been(apart: Head, tmp_path: Path) -> None:
    undisturbed = Job(str(tmp_path / "undisturbed"), [1, 1], asdict(load.load(None, SETTINGS)))
    assert run(undisturbed) == [[0, 0]]
    whole = losses(undisturbed.experiment())
    assert [[step for step, _ in rank] for rank in whole] == [list(range(1, 25))] * 2
    command = apart.launch(*ENGINE, "--max-restarts", "1")
    command.wait_for("saved step 4")
    apart.cluster.exec(1, ["pkill", "-KILL", "-x", "rank1"])
    command.wait_for("attempt 2 of at most 2")
    resumed = int(command.wait_for(r"resuming after step (\d+), from memory")[1])
    assert command.finish() == 0, command.text
    again = losses(apart.experiment)
    assert again[0] == whole[0]
    # Killed after its part of a step had gone to the others, and before its own line of it.
    assert again[1] in (whole[1], [line for line in whole[1] if line[0] != resumed])
    record = apart.record
    assert record["state"] == "done" and record["job"].endswith(".2")
    assert [one["state"] for one in record["attempts"]] == ["failed", "done"]
    assert record["attempts"][0]["verdict"]["rank"] == 1
    assert record["attempts"][0]["step"] >= 4
    assert apart.nothing_left() and not resume_dirs(apart)


def test_any_program_is_told_which_attempt_it_is_and_may_refuse_another(head: Head) -> None:
    script = head.script("program.py", PROGRAM)
    told = head.directory / "told"
    words = ["--max-restarts", "9", "--notify", f"cat >> {told}; sleep 0.1"]
    head.node_list = head.cluster.write_list([head.cluster.addresses[0]], "one.txt")
    command = head.launch("--nproc", "4", *words, script, "refuses")
    assert command.finish() == 1, command.text
    assert "the data are gone" in command.text and "the program wants no restart" in command.text
    assert command.text.count("attempt 2 count 1 kept by attempt 1") == 4
    before, line, after = head.log(0).partition(b"\norchestrator: attempt 2 of at most 10 (")
    assert line and b"kept nothing" in before and b"half a line" in before
    assert after.count(b"count 1") == 4
    restart, failure = map(json.loads, told.read_text().splitlines())
    assert (restart["event"], restart["attempt"], restart["verdict"]["rank"]) == ("restart", 2, 3)
    assert (failure["event"], failure["state"], failure["attempt"]) == ("failure", "failed", 2)
    assert head.record["launch"]["notify"] == ["cat (redacted)"]
    assert len(head.record["attempts"]) == 2
    status = head.command("orchestrator", "status")
    assert status.finish() == 0 and "attempt 2 of at most 10" in status.text
    assert head.nothing_left() and not resume_dirs(head)


def test_a_stop_ends_what_was_started_again(head: Head) -> None:
    head.script("program.py", PROGRAM)
    head.node_list = head.cluster.write_list([head.cluster.addresses[0]], "one.txt")
    command = head.launch("--nproc", "4", "--max-restarts", "9", "program.py", "stays")
    command.wait_for("attempt 2 count 1 kept by attempt 1")
    stop = head.command("orchestrator", "stop", "--grace", "0")
    assert stop.finish() == 0, stop.text
    assert command.finish() == 130, command.text
    assert head.record["state"] == "stopped" and len(head.record["attempts"]) == 2
    assert head.nothing_left() and not resume_dirs(head)


SAVES_ON_RANK_0 = """
import os, signal, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["ORCHESTRATOR_ATTEMPT"])
found = {name: open(f"runs/{name}/model.pt").read() for name in sorted(os.listdir("runs"))} \\
    if os.path.isdir("runs") else {}
above = open("../outputs/model.pt").read() if os.path.exists("../outputs") else "nothing"
print("attempt", attempt, "finds", found)
print("attempt", attempt, "finds above", above)
dist.barrier()
if rank == 0:
    os.makedirs("../outputs", exist_ok=True)
    open("../outputs/model.pt", "w").write(f"that of {attempt}")
    os.makedirs(f"runs/step-{attempt}")
    open(f"runs/step-{attempt}/model.pt", "w").write(f"of {attempt}")
    if attempt > 1:
        os.unlink("runs/latest")
    os.symlink(os.path.abspath(f"runs/step-{attempt}"), "runs/latest")
    if attempt == 2:
        os.rename("runs/step-1", "tmp-old")
dist.barrier()
if attempt < 3 and rank == attempt - 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def test_all_nodes_find_what_rank_0_alone_has_saved(apart: Head) -> None:
    apart.script("saves.py", SAVES_ON_RANK_0)
    command = apart.launch("--nproc", "1", "--max-restarts", "3", "saves.py")
    assert command.finish() == 0, command.text
    said = (apart.log(0) + apart.log(1)).decode()
    for attempt, names in {1: "{}", 2: "{'latest': 'of 1', 'step-1': 'of 1'}"}.items():
        assert said.count(f"attempt {attempt} finds {names}") == 2, said
    assert b"attempt 3 finds {'latest': 'of 2', 'step-2': 'of 2'}" in apart.log(0)
    # No file is deleted.
    kept = b"{'latest': 'of 2', 'step-1': 'of 1', 'step-2': 'of 2'}"
    assert b"attempt 3 finds " + kept in apart.log(1), said
    for attempt, above in {1: "nothing", 2: "that of 1", 3: "that of 2"}.items():
        assert said.count(f"attempt {attempt} finds above {above}") == 2, said
    kept = apart.experiment / "outputs" / "/".join(apart.directory.parts[-3:-1]) / "outputs"
    assert (kept / "model.pt").read_text() == "that of 3"
    assert command.text.count(": came in ") == 2 and "WARNING" not in command.text
    assert command.text.count("stays on the nodes: orchestrator pull PATH") == 1


def test_ranks_of_all_nodes_find_their_state_where_the_directory_is_shared(head: Head) -> None:
    head.script("program.py", PROGRAM)
    command = head.launch("--nproc", "2", "--max-restarts", "2", "program.py")
    assert command.finish() == 0, command.text
    assert command.text.count("attempt 2 count 1 kept by attempt 1") == 4, command.text
    assert "not every node sees" not in command.text
    assert head.nothing_left() and not resume_dirs(head)
