"""Leftovers of jobs on a node, and those that cleanup removes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.job import cleanup, job_processes
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.session import LIBRARY, Refusal, ServerSession
from orchestrator.protocol.events import Ended, event_to_data
from orchestrator.protocol.message import Nonsense, decode_value, encode_value
from orchestrator.protocol.requests.follow import Remove
from orchestrator.protocol.requests.start import Start
from tests.node.running import Job, bare_spec, script, spec_of, wait_until

OLD, NEW, OWN = "0" * 16, "1" * 16, "2" * 16


def left(home: Path, job: str, part: int = 0, **spec: Any) -> RunDir:
    """A run directory, as one that ended leaves it, or with a spec one that did not."""
    run = RunDir(job, part)
    run.create()
    Path(run.log).write_text("x" * 10_000)
    Path(run.spec).write_text(json.dumps({**encode_value(bare_spec()), **spec}))
    if not spec:
        ended = Ended(time=0.0, agent=0, why="", ranks={}, killed={}, left=())
        Path(run.events).write_text(json.dumps(event_to_data(ended)) + "\n")
    return run


def removed(*wanted: tuple[str, int]) -> list[str]:
    found = cleanup.remove_parts(wanted, f"/anywhere/{OWN}")
    return [part.problem for part in found.parts]


def test_remove_deletes_ended_run(home: Path) -> None:
    left(home, "one", 0), left(home, "one", 1), left(home, "two")
    found = cleanup.remove_parts([("one", 0), ("none", 0)], f"/anywhere/{OWN}")
    assert [run.problem for run in found.parts] == ["", ""]
    assert found.freed > 10_000
    assert sorted(path.name for path in (home / "runs").iterdir()) == ["one", "two"]
    # Nodes may share the home.
    assert [path.name for path in (home / "runs/one").iterdir()] == ["1"]
    assert removed(("one", 1)) == [""]
    assert [path.name for path in (home / "runs").iterdir()] == ["two"]


@pytest.mark.slow
def test_remove_refuses_running_run(home: Path, job: Job, tmp_path: Path) -> None:
    job.start(job.spec(script(tmp_path, "import time; print('here'); time.sleep(1000)")))
    wait_until(lambda: job.said("here"))
    wanted = (job.run.job, 0)
    others = [(job.run.job, 1), (job.run.job + "x", 0), ("\ud800", 0)]
    assert job_processes.living_runs([wanted, *others]) == [(*wanted, 1)]
    assert removed((job.run.job, 0)) == ["it still runs there"]
    # Its supervisor alone is enough, and so is a process alone.
    for process in job.living():
        os.kill(process, 19)
    job.supervisor.kill()
    job.supervisor.wait()
    assert job_processes.living_runs([wanted]) == [(*wanted, 1)]
    job.clear()
    wait_until(lambda: job_processes.living_runs([wanted]) == [])
    assert removed((job.run.job, 0)) == [""]


@pytest.mark.parametrize(
    "who",
    [("../../precious", 0), ("..", 0), ("", 0), ("a/b", 0), (None, 0), (["a"], 0), ("a\0", 0),
     ("precious", "../../../precious"), ("precious", -1), ("precious", True), ("precious", 1.0)],
)  # fmt: skip
def test_remove_refuses_invalid_job_names(home: Path, who: tuple[Any, Any]) -> None:
    (home / "runs/precious/1").mkdir(parents=True)
    (home / "precious").mkdir()
    try:
        asked = decode_value(Remove, {"parts": [list(who)]})
    except Nonsense:
        # The request is invalid, so no node receives it.
        return
    (found,) = removed(*asked.parts)
    assert "not a job" in found
    assert (home / "precious").is_dir() and (home / "runs/precious/1").is_dir()


def test_remove_follows_no_link(home: Path) -> None:
    precious = home / "precious"
    (precious / "0").mkdir(parents=True)
    (home / "runs/two").mkdir(parents=True)
    (home / "runs/one").symlink_to(precious)
    (home / "runs/two/0").symlink_to(precious)
    run = left(home, "three")
    Path(run.path, "inside").symlink_to(precious)
    found = removed(("one", 0), ("two", 0), ("three", 0))
    assert ["not a directory of ours" in words for words in found] == [True, True, False]
    assert (precious / "0").is_dir()


def test_remove_deletes_leftovers_of_interruption(home: Path) -> None:
    hidden = home / "runs" / ".one.0.gone-0123abcd"
    (hidden / "inside").mkdir(parents=True)
    (home / "lib" / f".{OLD}.gone-0123abcd").mkdir(parents=True)
    (home / "runs" / ".other").mkdir()
    removed()
    assert [path.name for path in (home / "runs").iterdir()] == [".other"]
    assert list((home / "lib").iterdir()) == []


def libraries(home: Path) -> set[str]:
    for name in (OLD, NEW, OWN, OLD + ".77", "mine", OLD + "0"):
        (home / "lib" / name).mkdir(parents=True, exist_ok=True)
        os.utime(home / "lib" / name, None if name == NEW else (1, 1))
    (home / "lib" / ("3" * 16)).symlink_to(home)
    removed()
    found = {path.name for path in (home / "lib").iterdir()}
    (home / "lib" / ("3" * 16)).unlink()
    return found


def test_remove_deletes_unused_libraries(home: Path) -> None:
    spared = {NEW, OWN, "mine", OLD + "0", "3" * 16}
    assert libraries(home) == spared
    left(home, "ended")
    assert libraries(home) == spared
    # One that has not ended needs its own; where that is not known, it may need any.
    left(home, "running", library=f"/home/x/lib/{OLD}")
    assert libraries(home) == spared | {OLD}
    left(home, "older", library=7)
    assert libraries(home) == spared | {OLD, OLD + ".77"}


@pytest.mark.slow
def test_spec_names_its_library(home: Path, job: Job) -> None:
    spec = job.spec({"kind": "script", "name": "x", "args": []}, agent=["/no/such/python"])
    with pytest.raises(Refusal):
        ServerSession().answer(Start(spec=spec_of(spec)))
    assert json.loads(Path(job.run.spec).read_text())["library"] == LIBRARY
