"""`orchestrator prune` with real nodes: never what runs, and what jobs left on their nodes."""

import json
import os
import secrets
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.records.experiment import Experiment
from tests.conftest import Cluster
from tests.launching import Head

HELLO = "import os; open(os.environ['ORCHESTRATOR_EXPERIMENT'] + '/outputs/x', 'a'); print('hi')\n"
WAIT = "import time; print('ready', flush=True); time.sleep(1000)\n"
OLD = "f" * 16


def prune(head: Head, *words: str) -> tuple[int, str]:
    command = head.command("orchestrator", "prune", *words)
    code = command.finish()
    assert "Traceback" not in command.text, command.text
    return code, command.text


def names(head: Head) -> list[str]:
    return sorted(path.name for path in (head.directory / "experiments").glob("[!.]*"))


def runs(head: Head, node: int) -> set[str]:
    """The jobs that a node has anything of, hidden or not."""
    return {path.name for path in (head.cluster.run_home(node) / "runs").iterdir()}


def rewrite(experiment: Path, **fields: Any) -> None:
    path = experiment / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture(scope="module")
def over(two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment of a job that is over, launched once for all that need one."""
    head = Head(two_nodes, tmp_path_factory.mktemp("over"))
    head.run("--no-torchrun", head.script("hello.py", HELLO))
    return head.experiment


def jobs_like(over: Path, head: Head, *letters: str) -> list[str]:
    """Jobs of this head with all that one has left, here and on the nodes; their names sort."""
    found = []
    for letter in letters:
        place = head.directory / "experiments" / f"{letter}{over.name[-16:]}"
        shutil.copytree(over, place)
        record = Experiment(over).read_record()
        copy = replace(record, job=f"{place.name}-{secrets.token_hex(3)}", experiment=str(place))
        Experiment(place).write_signed(copy)
        for node in (0, 1):
            places = head.cluster.run_home(node) / "runs"
            words = ["cp", "-a", str(places / record.job), str(places / copy.job)]
            subprocess.run(words, check=True)
        found.append(copy.job)
    return found


def test_prune_removes_experiments_and_node_directories(head: Head, over: Path) -> None:
    one, two, three = jobs_like(over, head, "a", "b", "c")
    for node in (0, 1):
        assert {one, two, three} <= runs(head, node)
        library = head.cluster.run_home(node) / "lib"
        for name in (OLD, "e" * 16, "0" * 16 + ".77", "mine"):
            (library / name / "orchestrator").mkdir(parents=True)
            if name != "e" * 16:
                os.utime(library / name, (1, 1))
    before = prune(head, "--keep", "2", "--yes")
    assert before[0] == 0 and "--on-nodes removes that too" in before[1]
    # Its record is gone, so no command of ours can find it.
    assert one in runs(head, 0)
    code, text = prune(head, "--keep", "1", "--yes", "--on-nodes")
    assert code == 0, text
    assert [name[0] for name in names(head)] == ["c"]
    for node in (0, 1):
        assert two not in runs(head, node) and three in runs(head, node)
        left = {path.name for path in (head.cluster.run_home(node) / "lib").iterdir()}
        assert OLD not in left and "0" * 16 + ".77" not in left
        assert {"mine", "e" * 16} <= left and len(left) == 3
    assert prune(head, "--keep", "0", "--yes", "--on-nodes")[0] == 0
    assert names(head) == [] and three not in runs(head, 1)


def test_prune_never_removes_running_job(head: Head) -> None:
    """Nor a copy of its record, nor while it is not followed, nor what it has on its nodes."""
    head.run("--no-torchrun", "--detach", head.script("wait.py", WAIT))
    head.end_background()
    experiment, running = head.experiment, head.record["job"]
    copies = [experiment.with_name(f"copy_2025010{day}_000000") for day in (1, 2)]
    for copy in copies:
        shutil.copytree(experiment, copy)
    rewrite(copies[1], state="lost")
    for words in (["--yes"], ["--yes", "--on-nodes"], ["--dry-run"]):
        code, text = prune(head, "--keep", "0", *words)
        assert (code, len(names(head))) == (0, 3), text
        assert text.count("it runs, on node 0") == 3
    # A record that says it is over is believed, but nothing of its job goes where that is not so.
    rewrite(copies[0], state="done")
    code, text = prune(head, "--keep", "0", "--yes", "--on-nodes")
    assert (code, len(names(head))) == (0, 3), text
    # Where one node cannot be asked, the other one's word is enough.
    head.cluster.kill_sshd(0)
    try:
        assert "it runs, on node 1" in prune(head, "--keep", "0", "--yes")[1]
        head.cluster.kill_sshd(1)
        code, text = prune(head, "--keep", "1", "--keep-failed", "--yes")
        assert code == 0 and experiment.name in names(head)
        # Its record said that it was done.
        assert copies[0].name not in names(head)
    finally:
        for node in (0, 1):
            head.cluster.start_sshd(node)
    assert running in runs(head, 0) and head.left(0) and head.left(1)
    head.command("orchestrator", "stop", experiment.name, "--now").ends()
    assert prune(head, "--keep", "0", "--yes", "--on-nodes")[0] == 0
    assert names(head) == [] and head.nothing_left()
    assert not [name for node in (0, 1) for name in runs(head, node) if running in name]


def test_prune_of_copy_keeps_node_directories(head: Head, over: Path) -> None:
    (original,) = jobs_like(over, head, "a")
    shutil.copytree(head.experiment, head.experiment.with_name("copy_20250101_000000"))
    code, text = prune(head, "--keep", "1", "--yes", "--on-nodes")
    assert code == 0, text
    assert [name[0] for name in names(head)] == ["a"]
    assert original in runs(head, 0) and original in runs(head, 1)


def test_prune_follows_no_symlink_on_node(head: Head, over: Path) -> None:
    one, two = jobs_like(over, head, "a", "b")
    home = head.cluster.home(0)
    precious = home / "precious"
    (precious / "0").mkdir(parents=True)
    (precious / "0/file").write_text("x")
    first, second = (head.cluster.run_home(0) / "runs" / name for name in (one, two))
    shutil.rmtree(first)
    first.symlink_to("../../precious")
    (second / "0/link").symlink_to("../../../../precious")
    old = head.cluster.run_home(0) / "lib" / OLD
    old.symlink_to("../../precious")
    code, text = prune(head, "--keep", "0", "--yes", "--on-nodes")
    assert code == 1
    assert "is not a directory of ours" in text
    assert [name[0] for name in names(head)] == ["a"]
    assert (precious / "0/file").read_text() == "x" and old.is_symlink()
    assert not second.exists()
    first.unlink()
    old.unlink()
    assert prune(head, "--keep", "0", "--yes", "--on-nodes")[0] == 0
