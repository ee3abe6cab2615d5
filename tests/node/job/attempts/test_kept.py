"""What a later attempt could go on from, as its node sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.node.job.attempts import kept
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.session import Session
from orchestrator.protocol.messages import AskSaved, Saved
from tests.node.server.test_next_spec import FIRST

CHECKPOINT = "experiment/outputs/checkpoints/step_00000007"


@pytest.mark.parametrize(
    ("files", "at"),
    [
        ({}, 0.0),
        ({"memory/mine.bin": 20.0}, 20.0),  # a script's own
        ({"memory/script.0.0": 20.0, "memory/script.0.1": 30.0}, 30.0),
        ({"memory/trainer1.0.0": 20.0}, 20.0),
        ({CHECKPOINT: 40.0, "memory/script.0.0": 20.0}, 40.0),
        ({"experiment/outputs/checkpoints/.step_00000007.1a.partial": 40.0}, 0.0),
        ({"experiment/outputs/weights.pt": 40.0}, 0.0),
    ],
)
def test_what_is_there(
    files: dict[str, float], at: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    for name, when in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
    run = RunDir("e-abc", 0)
    run.create()
    own = {
        "ORCHESTRATOR_RESUME_DIR": str(tmp_path / "memory"),
        "ORCHESTRATOR_EXPERIMENT": str(tmp_path / "experiment"),
    }
    run.write_spec(FIRST.replace(env=own))
    assert kept.last(run) == at
    other = RunDir("e-abc", 1)  # without either directory
    other.create()
    other.write_spec(FIRST.replace(env={}))
    assert kept.last(other) == 0.0


def test_what_the_program_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the job began, where it runs and in its outputs; a large directory ends the search."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    run = RunDir("e-abc", 0)
    run.create()
    own = {"ORCHESTRATOR_EXPERIMENT": str(tmp_path / "experiment")}
    run.write_spec(FIRST.replace(env=own, workdir=str(tmp_path / "work")))
    names = ["work/last.ckpt", "work/a b/model.pt", "experiment/outputs/best.safetensors"]
    names += ["work/step4/.metadata"]
    others = [
        "experiment/outputs/checkpoints/step_00000004/.metadata",
        "work/train.py",
        "work/.hidden/x.pt",
        "work/.x.pt",
        "work/1/2/3/4/5/6/deep.pt",
    ]
    for name in (*names, *others, "work/before.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    os.utime(tmp_path / "work/before.pt", (1.0, 1.0))
    (tmp_path / "work/away").symlink_to("/usr")
    found = Session().saved(AskSaved(job="e-abc", node=0)).names
    assert found == ("a b/model.pt", "last.ckpt", "outputs/best.safetensors", "step4/.metadata")
    monkeypatch.setattr(kept, "MOST_LOOKED_AT", 1)
    assert len(kept.saved(run).names) <= 2 and not kept.saved(run).shared


def test_whether_it_saves_on_a_disk_that_nodes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    run = RunDir("e-abc", 0)
    run.create()
    work = tmp_path / "work"
    shared = work / "experiments/e"
    shared.mkdir(parents=True)
    own = Path(run.path, "experiment")
    own.mkdir()
    for experiment, workdir, told in (
        (shared, work, True),
        (shared, tmp_path / "home", False),  # as with --workdir, or in a snapshot of the code
        (own, work, False),
        (own, tmp_path, False),
        (work / "gone", work, False),
    ):
        env = {"ORCHESTRATOR_EXPERIMENT": str(experiment)}
        spec = FIRST.replace(env=env, workdir=str(workdir))
        assert kept.one_disk(run, spec) == told, (experiment, workdir)


def test_nodes_whose_clocks_disagree_see_the_same_on_a_disk_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    experiment = tmp_path / "experiments/e"
    experiment.mkdir(parents=True)
    files = [experiment / "config.yaml", tmp_path / "last.pt", tmp_path / "before.pt"]
    for file, when in zip(files, (1000, 1001, 999), strict=True):
        file.touch()
        os.utime(file, (when, when))
    for node, clock in ((0, 1000), (1, 5000)):
        run = RunDir("e-abc", node)
        run.create()
        env = {"ORCHESTRATOR_EXPERIMENT": str(experiment)}
        run.write_spec(FIRST.replace(node=node, env=env, workdir=str(tmp_path)))
        os.utime(run.spec, (clock, clock))
        assert kept.saved(run) == Saved(names=("last.pt",), shared=True)
