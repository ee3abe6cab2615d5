"""The directory that a job's attempts share on a node, and its removal."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.node.job import cleanup, resume_dir
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.events import Ended, event_to_data


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev/shm, a /var/tmp and a home of this test's own."""
    for name, directory in (("MEMORY", "shm"), ("SCRATCH", "scratch")):
        (tmp_path / directory).mkdir()
        monkeypatch.setattr(resume_dir, name, str(tmp_path / directory))
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    return tmp_path


def run_of(job: str, ended: float | None, attempt: int = 1) -> RunDir:
    run = RunDir(job, 0, attempt)
    run.create()
    if ended is not None:
        end = Ended(time=ended, agent=1, why="", ranks={}, killed={}, left=())
        Path(run.events).write_text(json.dumps(event_to_data(end)) + "\n")
    return run


@pytest.mark.parametrize(
    ("in_memory", "local", "parent"),
    [
        (False, True, "home/resume"),
        (False, False, f"scratch/orchestrator-{os.getuid()}"),
        (True, True, f"shm/orchestrator-{os.getuid()}"),
    ],
)
def test_resume_dir_is_private_and_removable(
    place: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, local: bool, parent: str
) -> None:
    """It is on the node's own disk, also where the home is on a network disk."""
    monkeypatch.setattr(resume_dir.files, "is_local", lambda _: local)
    run = run_of("e-abc", None)
    path = resume_dir.make_resume_dir(run, in_memory=in_memory)
    assert Path(path).parent == place / parent
    assert Path(path).stat().st_mode & 0o777 == Path(path).parent.stat().st_mode & 0o777 == 0o700
    Path(path, "state").write_text("step 7")
    assert resume_dir.make_resume_dir(run, in_memory=in_memory) == path
    assert Path(path, "state").exists()
    assert resume_dir.remove_resume_dir(run) and not (place / parent).exists()
    assert resume_dir.remove_resume_dir(run), "again does nothing"


def by_another(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)


def linked(place: Path) -> None:
    place.with_name("elsewhere").mkdir(mode=0o700)
    place.symlink_to("elsewhere")


def listed(place: Path) -> None:
    place.mkdir()
    place.chmod(0o755)


@pytest.mark.parametrize(
    "squat",
    [
        pytest.param(
            by_another,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="giving away needs root"),
        ),
        linked,
        os.mkfifo,
        Path.touch,
        listed,
    ],
)
def test_resume_dir_avoids_name_taken_by_other_user(
    squat: Callable[[Path], object], place: Path
) -> None:
    run, memory = run_of("e-abc", None), place / "shm"
    squat(Path(resume_dir.resume_roots()[0]))
    path = resume_dir.make_resume_dir(run, in_memory=True)
    assert path == f"{place}/home/resume/e-abc.0"
    before = sorted(memory.rglob("*"))
    assert resume_dir.remove_resume_dir(run) and not Path(path).exists()
    resume_dir.remove_forgotten(time.time() + 1e6)
    assert sorted(memory.rglob("*")) == before, "what is not ours stays"


def test_remove_forgotten_removes_directories_of_old_jobs(place: Path) -> None:
    now = time.time()
    kept = [
        resume_dir.make_resume_dir(run_of("running-1", None)),
        resume_dir.make_resume_dir(run_of("just-ended-1", now - 60)),
        resume_dir.make_resume_dir(run_of("goes-on-1", now - 9000)),
        resume_dir.make_resume_dir(RunDir("of-another-home-1", 0)),
    ]
    run_of("goes-on-1", None, attempt=2)
    old = resume_dir.make_resume_dir(run_of("old-1", now - 9000), in_memory=True)
    # Its machine was lost and came back.
    lost = run_of("lost-1", None)
    no_last_word = resume_dir.make_resume_dir(lost)
    os.utime(lost.path, (now - 9000, now - 9000))
    resume_dir.remove_forgotten(now)
    assert [Path(path).exists() for path in kept] == [True] * 4
    assert not Path(old).exists() and not Path(no_last_word).exists()


def test_resume_dir_goes_with_run(place: Path) -> None:
    path = resume_dir.make_resume_dir(run_of("old-1", 1.0))
    removed = cleanup.remove_parts([("old-1", 0)], "none")
    assert [part.problem for part in removed.parts] == [""] and not Path(path).exists()
