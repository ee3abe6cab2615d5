"""Two experiments are compared: differences are named, and equal values are not."""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.start import record
from orchestrator.head.status import comparison
from orchestrator.protocol.events import RankState
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.metrics.trainers import file_name

FACTS = {"torch": "2.9.0", "hostname": "a", "software": {"cuda": "12.8"}, "cpus": 8}
LONG = "--option value " * 20


def experiment(path: Path, torch: str = "2.9.0", lr: float = 0.1, **manifest: Any) -> Experiment:
    """An experiment of two nodes with all files that are read."""
    (path / "outputs").mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    nodes = [
        NodeRecord(
            index=index, name=name, host=name, user=None, port=None, address="", python="",
            first_rank=index, nproc=1, ranks={index: RankState(peak_kb=5)},
        )
        for index, name in enumerate(("a", "b"))
    ]  # fmt: skip
    command = ["master_launch", *LONG.split(), f"--set optimizer.lr={lr}"]
    record = JobRecord("job", str(path), "done", command, nodes, 100.0, ended=109.0)
    made = Experiment(path)
    made.write_record(record)
    made.write("config.yaml", f"optimizer:\n  lr: {lr}\n  name: adamw\nenv: {{}}\n")
    (path / "outputs/rank_00_metrics.jsonl").write_text(
        json.dumps({"time": 1, "rank": 0, "step": 9, "loss": lr}) + '\n{"time": 2, "cut'
    )
    own = {"ORCHESTRATOR_JOB": path.name, "NODE_RANK": "0"}
    described = [
        {"name": name, "facts": {**FACTS, "torch": version}, "environment": own}
        for name, version in (("a", "2.9.0"), ("b", torch))
    ]
    made.write("manifest.json", json.dumps({"nodes": described, **manifest}))
    return made


def found(first: Experiment, second: Experiment) -> comparison.Differences:
    return comparison.compare_experiments([first, second])


def write_metrics(made: Experiment, trainer: int, *lines: dict[str, Any]) -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (made.path / "outputs" / file_name(0, trainer)).write_text(text)


def test_metrics_are_compared_at_same_step(tmp_path: Path) -> None:
    pair = experiment(tmp_path / "one"), experiment(tmp_path / "two")
    for made, loss, ms in ((pair[0], 1.0, 100.0), (pair[1], 0.5, 90.0)):
        more = [{"step": 9, "loss": loss, "step_ms": ms, "memory_bytes": 5}] * (made is pair[0])
        write_metrics(
            made, 1, {"step": 4, "loss": 2 * loss, "step_ms": ms, "tokens_per_s": 10 * ms}, *more
        )
    results = found(*pair)["results"]
    assert results == {
        "steps": [9, 4],
        "loss at step 4": [2.0, 1.0],
        "step_ms, median": [100.0, 90.0],
        "tokens_per_s, median": [1000.0, 900.0],
        "memory_bytes, most": [5.0, None],
    }


def test_lost_loss_differs_from_finite_loss(tmp_path: Path) -> None:
    one, two = experiment(tmp_path / "one"), experiment(tmp_path / "two")
    write_metrics(one, 1, {"step": 4, "loss": 0.5}, {"step": 9, "loss": 0.4, "lr": 0.1})
    write_metrics(two, 1, {"step": 4, "loss": 0.5}, {"step": 9, "loss": None, "lr": 0.1})
    assert found(one, two)["results"] == {"loss, last": [None, comparison.NAN]}


def test_equal_experiments_do_not_differ(tmp_path: Path) -> None:
    sections = found(experiment(tmp_path / "one"), experiment(tmp_path / "two"))
    assert set(sections) == {
        *("code", "command", "config", "versions", "nodes", "environment", "results")
    }
    assert not any(sections.values())


def test_each_section_names_differences(tmp_path: Path) -> None:
    one = experiment(tmp_path / "one", code={"commit": "abc", "changed_files": []})
    two = experiment(
        tmp_path / "two", "2.8.1", 0.2,
        code={"commit": "def", "changed_files": ["x y.py", "b.py"]},
        head_environment={"CONDA_PREFIX": "/c"},
    )  # fmt: skip
    two.write_record(dataclasses.replace(two.read_record(), state="failed", exit_code=1))
    sections = found(one, two)
    assert sections["code"]["commit"] == ["abc", "def"]
    assert sections["code"]["edited files"] == [None, "x y.py, b.py"]
    assert sections["config"] == {"optimizer.lr": [0.1, 0.2]}
    assert sections["versions"] == {"torch": ["2.9.0", {"a": "2.9.0", "b": "2.8.1"}]}
    assert sections["nodes"] == {}
    assert sections["environment"] == {"CONDA_PREFIX (head)": [None, "/c"]}
    assert sections["results"] == {
        "state": ["done", "failed"], "exit code": [None, 1], "loss at step 9": [0.1, 0.2],
    }  # fmt: skip


def test_record_of_earlier_version_lacks_fields(tmp_path: Path) -> None:
    one, two = experiment(tmp_path / "one"), experiment(tmp_path / "two")
    for name in ("manifest.json", "config.yaml", "outputs/rank_00_metrics.jsonl"):
        (two.path / name).unlink()
    assert found(one, two)["config"]["optimizer.lr"] == [0.1, None]


def test_git_state_names_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine needs more time.
    monkeypatch.setattr(record, "STATE_SECONDS", 120.0)

    def git(*words: str) -> None:
        own = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(tmp_path), *own, *words], check=True, capture_output=True)

    (tmp_path / "ä.py").write_text("old\n")
    (tmp_path / "sub").mkdir()
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = record.git_state(tmp_path)
    assert clean is not None and clean["changed_files"] == []
    for name in ("ä.py", "sub/b.py", "sub/experiments/a/job.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("new\n")
    git("add", ".")
    below = record.git_state(tmp_path / "sub", [b"experiments"])
    assert below is not None and sorted(below["changed_files"]) == ["sub/b.py", "ä.py"]
    assert record.git_state(tmp_path.parent) is None
