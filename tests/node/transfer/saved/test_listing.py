"""What a program has saved on a node, as that node sees it."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import pytest

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import Visit
from orchestrator.node.transfer.saved import listing
from orchestrator.node.transfer.saved.copies import Copies, stamp_of
from orchestrator.node.transfer.saved.listing import one_disk
from orchestrator.protocol.requests.transfer import AskSaved, Saved
from tests.node.start.test_next_spec import FIRST


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    run = RunDir("e-abc", 0)
    run.create()
    own = Path(run.path, "experiment")
    (own / "outputs").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    env = {"ORCHESTRATOR_EXPERIMENT": str(own)}
    run.write_spec(FIRST.replace(env=env, workdir=str(tmp_path / "work")))
    return run


def names(saved: Saved) -> list[str]:
    return [f"{file.place}:{file.path}" for file in saved.files if file.kind != "directory"]


def write(path: Path, *others: str) -> None:
    for name in others:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"some")


def test_what_the_program_has_written(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name is, since the job began; a large directory ends the search."""
    work, memory = tmp_path / "work", tmp_path / "memory"
    write(work, "last.ckpt", "a b/model", "step4/.metadata", "train.log", "before.pt")
    write(work, ".bash_history", ".hidden/x.pt", "__pycache__/x.pyc", "core.123")
    write(work, ".x.1.before", ".orchestrator-copies-1.json", "step4/.x.7.before")
    (work / "latest").symlink_to("a b")
    (work / "a b/absolute").symlink_to(work / "step4")
    (work / "away").symlink_to("/usr")
    (work / "out").symlink_to("../elsewhere")
    os.utime(work / "before.pt", (1.0, 1.0))
    outputs = Path(run.path, "experiment/outputs")
    write(outputs, "best.pth", ".metadata", "checkpoints/mine.pt", "results/rank_0.pkl")
    write(outputs, "checkpoints/step_00000004/.metadata", "rank_00_metrics.jsonl")
    memory.mkdir()
    write(memory, "state.pt", "trainer1.0.1", "script.0.000001-abcdef01")
    env = {**run.read_spec().env, "ORCHESTRATOR_RESUME_DIR": str(memory)}
    spec = run.read_spec().replace(env=env)
    Path(run.spec).unlink()
    run.write_spec(spec)
    os.utime(run.spec, (100, 100))
    found = Visit().answer(AskSaved(job="e-abc", node=0))
    assert sorted(names(found)) == [
        *("memory:state.pt", "outputs:.metadata", "outputs:best.pth"),
        *("outputs:checkpoints/mine.pt", "work:a b/absolute", "work:a b/model"),
        *("work:last.ckpt", "work:latest", "work:step4/.metadata", "work:train.log"),
    ]
    links = {file.path: file.target for file in found.files if file.kind == "link"}
    assert links == {"latest": "a b", "a b/absolute": "../step4"}, "both lead inside, on any node"
    assert found.whole and not found.shared
    monkeypatch.setattr(listing, "MOST_SEEN", 1)
    assert not listing.saved(run).whole


def test_a_directory_that_the_launch_gave_is_looked_at_too(tmp_path: Path, run: RunDir) -> None:
    write(tmp_path / "disk/ckpts", "a.pt")
    write(tmp_path / "disk/data", "b.pt")
    (tmp_path / "work/ckpts").symlink_to(tmp_path / "disk/ckpts")
    (tmp_path / "work/data").symlink_to(tmp_path / "disk/data")
    (tmp_path / "disk/ckpts/last").symlink_to(tmp_path / "work/ckpts/a.pt")
    (tmp_path / "disk/ckpts/away").symlink_to(tmp_path / "work/data/b.pt")
    found = listing.saved(run, ["ckpts", "absent"])
    assert names(found) == ["given/ckpts:a.pt", "given/ckpts:last"]
    assert found.files[1].target == "a.pt", "whatever the way on which its path leads there"
    (tmp_path / "away").symlink_to(tmp_path / "disk/ckpts")
    assert not names(listing.saved(run, ["../away"])), "it leads out"


def test_copies_are_told_apart_and_those_of_another_job_are_old_files(
    tmp_path: Path, run: RunDir
) -> None:
    """The list of copies is in a directory that may outlive jobs."""
    work = tmp_path / "work"
    write(work, "of_this.pt", "of_another.pt", "changed.pt")
    copies = Copies(str(work))
    for name, job in (("of_this.pt", "e-abc"), ("of_another.pt", "e-old"), ("changed.pt", "e-abc")):
        os.utime(work / name, (1, 1))
        copies.expect(name, stamp_of((work / name).stat()), "node a", job)
    copies.write()
    (work / "changed.pt").write_bytes(b"more")
    found = {file.path: file.by for file in listing.saved(run).files}
    assert found == {"of_this.pt": "node a", "changed.pt": ""}
    (work / "of_this.pt").unlink()
    assert [(file.path, file.kind) for file in listing.saved(run).files] == [
        ("changed.pt", "file"),
        ("of_this.pt", "removed"),
    ]
    Path(copies.path).write_text("[1, 2")
    assert [file.path for file in listing.saved(run).files] == ["changed.pt"]


def test_in_which_attempt_it_was_written(tmp_path: Path, run: RunDir) -> None:
    os.utime(run.spec, (100, 100))
    for number, at in ((2, 200), (3, 300)):
        later = RunDir(f"e-abc.{number}", 1)
        later.create()
        later.write_spec(FIRST)
        os.utime(later.spec, (at, at))
    for name, at in (("a.pt", 150), ("b.pt", 250), ("c.pt", 300)):
        write(tmp_path / "work", name)
        os.utime(tmp_path / "work" / name, (at, at))
    assert [(file.path, file.attempt) for file in listing.saved(run).files] == [
        *(("a.pt", 1), ("b.pt", 2)),
        ("c.pt", 3),
    ]
    back = RunDir("e-abc.4", 1)  # the clock was set back before it
    back.create()
    back.write_spec(FIRST)
    os.utime(back.spec, (50, 50))
    write(tmp_path / "work", "d.pt")
    os.utime(tmp_path / "work/d.pt", (60, 60))
    assert ("d.pt", 4) in [(file.path, file.attempt) for file in listing.saved(run).files]


def whole() -> dict[str, bytes]:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data.pkl", os.urandom(1000))
    header = json.dumps(
        {"__metadata__": {}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    ).encode()
    tensors = len(header).to_bytes(8, "little") + header + bytes(8)
    return {
        "a.pt": archive.getvalue(),
        "b.npz": archive.getvalue(),
        "c.safetensors": tensors,
    }


@pytest.mark.parametrize("name", sorted(whole()))
def test_a_file_that_lacks_its_end(name: str, tmp_path: Path, run: RunDir) -> None:
    path, content = tmp_path / "work" / name, whole()[name]
    for size in (len(content), len(content) - 5, 20):
        path.write_bytes(content[:size])
        (file,) = listing.saved(run).files
        assert file.sound == (size == len(content)), size


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
        assert one_disk(run, spec) == told, (experiment, workdir)


def test_nodes_whose_clocks_disagree_see_the_same_on_a_disk_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of other jobs that keep their experiments beside this one's."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    experiment = tmp_path / "experiments/e"
    experiment.mkdir(parents=True)
    write(tmp_path, "experiments/e/config.yaml", "last.ckpt", "before.ckpt")
    write(tmp_path, "experiments/other/outputs/x.ckpt")
    for name, when in (("experiments/e/config.yaml", 1000), ("last.ckpt", 1001)):
        os.utime(tmp_path / name, (when, when))
    os.utime(tmp_path / "before.ckpt", (999, 999))
    for node, clock in ((0, 1000), (1, 5000)):
        run = RunDir("e-abc", node)
        run.create()
        env = {"ORCHESTRATOR_EXPERIMENT": str(experiment)}
        run.write_spec(FIRST.replace(node=node, env=env, workdir=str(tmp_path)))
        os.utime(run.spec, (clock, clock))
        found = listing.saved(run)
        assert names(found) == ["work:last.ckpt"] and found.shared
