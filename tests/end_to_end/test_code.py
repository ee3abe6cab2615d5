"""Nodes that do not share the head's directory run a snapshot of it; those that do run in it."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces
from tests.launching import Head

# A job that waits at a FIFO until the test writes into it, and imports another file only then.
PROGRAM = """
import os, helper
here = os.path.basename(os.getcwd())
print("it says", helper.WORD, "in", here, open("data/x").read(), flush=True)
if os.environ.get("HOLD"):
    open(os.environ["HOLD"]).read()
    import later
    print("later it says", later.WORD, flush=True)
"""
Apart = Callable[..., Head]


@pytest.fixture
def apart(two_nodes: Any, tmp_path: Path) -> Apart:
    """Someone in a directory in whose place some nodes have one of their own, with their data."""
    require_namespaces()
    assert isinstance(two_nodes, NetnsCluster)
    work = tmp_path / "my project"
    work.mkdir()

    def make(*nodes: int) -> Head:
        for node in nodes:
            two_nodes.exec(node, ["mount", "-t", "tmpfs", "private", str(work)])
            inside = two_nodes.path(node, work)
            (inside / "data").mkdir()
            (inside / "data/x").write_text(f"data {node}")
            (inside / "helper.py").write_text("WORD = 'stale'")
        someone = Head(two_nodes, work)
        someone.script("train.py", PROGRAM)
        someone.script("helper.py", "WORD = 'one'")
        someone.script("later.py", "WORD = 'one, too'")
        return someone

    return make


def snapshots(head: Head, node: int) -> int:
    return len(names(head, node))


def names(head: Head, node: int) -> list[str]:
    found = head.cluster.run_home(node).glob("code/snapshots/*/*/*/my project")
    return [path.parents[2].name for path in found]


def test_only_missing_code_is_sent_and_running_job_keeps_its_own(
    apart: Apart, two_nodes: NetnsCluster
) -> None:
    head = apart(0, 1)
    fifos = [two_nodes.path(node, head.directory / "hold") for node in range(2)]
    for fifo in fifos:
        os.mkfifo(fifo)
    hold = ["--no-torchrun", "--env", f"HOLD={head.directory / 'hold'}"]
    first = head.launch("--name", "first", *hold, "train.py")
    first.wait_for(r"code [0-9a-f]{12} \(3 files, .*\) on .*; 3 files sent")
    first.wait_for_all("it says one in my project data 0", "it says one in my project data 1")
    # Ranks may send each other absolute paths.
    assert names(head, 0) == names(head, 1)
    head.script("helper.py", "WORD = 'two'")
    head.script("later.py", "WORD = 'two, too'")
    planned = head.run("--dry-run", "train.py")
    assert "a launch sends the code (3 files" in planned.text
    alone = ["--nnodes", "1", "--no-torchrun"]
    second = head.run(*alone, "--name", "second", "train.py")
    assert "; 2 files sent" in second.text
    assert "it says two in my project data 0" in second.text
    third = head.run(*alone, "--name", "third", str(head.directory / "train.py"))
    assert "files sent" not in third.text and "file sent" not in third.text
    assert "it says two in my project data 0" in third.text
    trees = [
        json.loads((path / "manifest.json").read_text())["tree"]
        for name in ("first", "second", "third")
        for path in (head.directory / "experiments").glob(f"{name}_*")
    ]
    assert trees[0] != trees[1] == trees[2]
    for fifo in fifos:
        fifo.write_text("")
    first.wait_for_all("rank0.*later it says one, too", "rank1.*later it says one, too")
    assert first.finish() == 0
    assert [snapshots(head, node) for node in range(2)] == [3, 1]
    head.command("orchestrator", "prune", "--keep", "1", "--on-nodes", "--yes").ends()
    assert [snapshots(head, node) for node in range(2)] == [1, 0]
    helper = head.script("helper.py", "raise ValueError('no word')")
    broken = head.launch(*alone, "--name", "broken", "train.py").ends(1)
    assert f"at {head.directory / helper}:1 in <module>" in broken.text


def test_nodes_with_and_without_shared_disk_are_mixed(
    apart: Apart, two_nodes: NetnsCluster
) -> None:
    head = apart(1)
    (head.directory / "data").mkdir()
    (head.directory / "data/x").write_text("data here")
    with (head.directory / "large").open("wb") as file:
        file.truncate(3_000_000)
    refused = head.launch("--set", "sync.largest_file=1", "train.py").ends(3)
    assert "large has 3 MB" in refused.text
    assert "--set sync.largest_file=3" in refused.text
    off = head.launch("--sync", "off", "train.py").ends(3)
    assert "script not found: " in off.text
    command = head.run("--no-torchrun", "--set", "sync.exclude=[large]", "train.py")
    assert "it says one in my project data here" in command.text
    second = re.escape(two_nodes.addresses[1])
    assert re.search(rf"\(4 files, .*\) on {second}; .* sent", command.text), command.text
    assert not list(two_nodes.path(0, head.directory).glob(".orchestrator*"))


def test_full_disk_on_one_node_is_named(apart: Apart, two_nodes: NetnsCluster) -> None:
    head = apart(1)
    store = two_nodes.run_home(1) / "code"
    inside = str(two_nodes.home_path) + "/.orchestrator/code"
    store.mkdir(parents=True, exist_ok=True)
    two_nodes.exec(1, ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "small", inside])
    try:
        (head.directory / "large").write_bytes(os.urandom(2_000_000))
        full = head.launch("train.py").ends(4)
        assert "1 of 2 nodes cannot be used; nothing was started" in full.text
        assert f"{inside} cannot be written: No space left on device" in full.text
        assert head.experiments == []
    finally:
        two_nodes.exec(1, ["umount", "-l", inside])


def test_rerun_uses_code_of_experiment(apart: Apart, two_nodes: NetnsCluster) -> None:
    head = apart(1)
    head.script("dice.py", "import os, sys, helper; print('it says', helper.WORD, *sys.argv[1:])")
    (head.directory / "helper.py").chmod(0o440)
    (head.directory / "build").mkdir()
    first = head.run("--no-torchrun", "--set", "sync.include=[build]", "dice.py", "a b")
    assert "rank1 | it says one a b" in first.text
    name = head.experiment.name
    (head.directory / "helper.py").unlink()
    head.script("dice.py", "raise SystemExit('the new code')")
    again = head.command("orchestrator", "rerun", "--set", "launch.note=again").ends()
    for rank in range(2):
        assert f"rank{rank} | it says one a b" in again.text
    old, new = (json.loads((path / "manifest.json").read_text()) for path in head.experiments)
    assert (old["tree"], old["directory"], old["command"]) == (
        new["tree"], new["directory"], new["command"],
    )  # fmt: skip
    assert new["rerun_of"] == name
    assert not list((head.directory.parent / ".cache/orchestrator").glob("rerun-*"))


SAVES = """
import os, pathlib, signal, time
import mine
rank, attempt = os.environ["RANK"], os.environ["ORCHESTRATOR_ATTEMPT"]
state, own, new = map(pathlib.Path, ("state.txt", "data/x", "data/new.txt"))
before = state.read_text() if state.exists() else 0
print("attempt", attempt, "imports", mine.X, "starts at", before)
if attempt == "2":
    print("it finds", own.read_text(), "and", new.read_text())
if rank == "0":
    for path in (state, own, new):
        path.write_text(f"step {attempt}")
    pathlib.Path("ck").mkdir(exist_ok=True)
    pathlib.Path("ck/model.txt").write_text(attempt)
if attempt == "1":
    time.sleep(1 if rank == "1" else 60)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_placed_on_node_by_hand_are_neither_run_nor_written(
    apart: Apart, two_nodes: NetnsCluster, tmp_path: Path
) -> None:
    """Each node has an older clone at this path, installed editable, and states of an old run."""
    head = apart(0, 1)
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "__editable__.mine-1.pth").write_text(f"{head.directory}/src\n")
    for node in range(2):
        own = two_nodes.path(node, head.directory)
        for name, text in (
            ("src/mine.py", "X = 1"),
            ("state.txt", f"by hand {node}"),
            ("ck/a", ""),
        ):
            (own / name).parent.mkdir(exist_ok=True)
            (own / name).write_text(text)
    (head.directory / "src").mkdir()
    head.script("src/mine.py", "X = 2")
    head.script("saves.py", SAVES)
    words = ["--no-torchrun", "--max-restarts", "1", "--python", str(python), "saves.py"]
    command = head.run(*words)
    assert command.text.count("attempt 1 imports 2 starts at 0") == 2, command.text
    assert command.text.count("attempt 2 imports 2 starts at step 1") == 2, command.text
    assert "ranks import the copy" in command.text
    assert command.text.count("it finds step 1 and step 1") == 2, command.text
    assert f"over the node's own {head.directory}/data/x" in command.text, command.text
    for name in ("state.txt", "data/x", "data/new.txt"):
        assert (head.experiment / "outputs" / name).read_text() == "step 2"
    for node in range(2):
        own = two_nodes.path(node, head.directory)
        assert (own / "state.txt").read_text() == f"by hand {node}"
        assert not (own / "ck/model.txt").exists()
        assert not (own / "data/new.txt").exists()
    assert (own / "data/x").read_text() == "data 1"
