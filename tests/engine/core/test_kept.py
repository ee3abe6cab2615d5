"""Extra state of a program survives, from disk and from memory, on any layout."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.programs.keeping import PLACE, SAVED
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

STEPS = 7


def job(
    path: Path,
    name: str,
    nodes: list[int],
    steps: int,
    program: str = "keeping",
    env: dict[str, str] | None = None,
    **more: Any,
) -> Job:
    call, env = f"tests.engine.programs.keeping:{program}", {**(env or {}), PLACE: str(steps)}
    return Job(str(path / name), nodes, {}, call=call, env=env, **more)


def kept(job: Job, rank: int = 0) -> tuple[list[Any], dict[str, Any]]:
    told, average = json.loads((job.path / f"kept_{rank}").read_text())
    return told, average


def of_memory(path: Path) -> dict[str, str]:
    return {"memory": str(path / "memory")} if path.name.startswith("memory") else {}


def test_kept_average_resumes_exactly(tmp_path: Path) -> None:
    """Averages of sharded weights also keep the values of a run that was never interrupted."""
    whole = job(tmp_path / "apart", "whole", [2], STEPS)
    begun, later = [whole], {}
    for where in ("disk", "memory"):
        path = tmp_path / where
        begun.append(job(path, "first", [2], SAVED, **of_memory(path)))
    assert run(*begun) == [[0, 0]] * len(begun), begun[-1].output()
    for where, nodes in itertools.product(("disk", "memory"), ([2], [1])):
        path = shutil.copytree(tmp_path / where, tmp_path / f"{where} {nodes}")
        place = "memory" if where == "memory" else str(path / "saved")
        later[place, sum(nodes)] = job(path, "again", nodes, STEPS, **of_memory(path))
    codes = run(*later.values())
    told, average = kept(whole)
    assert told == [STEPS, [2.0 * STEPS] * 2, STEPS, "('a', b'b')", [float(STEPS)] * 2]
    for ((place, ranks), again), ended in zip(later.items(), codes, strict=True):
        assert ended == [0] * ranks, again.output()
        assert f"resuming after step {SAVED}, from {place}" in again.output()
        for rank in range(ranks):
            own, values = kept(again, rank)
            assert own == told and values.keys() == average.keys()
            for name, value in values.items():
                assert value == pytest.approx(average[name], abs=1e-5), name


def test_kept_buffers_of_loss_resume_exactly(tmp_path: Path) -> None:
    program, nodes, env = "centring", [1], {"STRATEGY": "none"}
    whole = job(tmp_path / "whole", "whole", nodes, STEPS, program, env)
    first = job(tmp_path / "apart", "first", nodes, SAVED, program, env)
    again = job(tmp_path / "apart", "again", nodes, STEPS, program, env)
    for jobs in ([whole, first], [again]):
        assert run(*jobs) == [[0] * nodes[0]] * len(jobs), jobs[0].output()
    assert f"resuming after step {SAVED}, from " in again.output()
    assert kept(again) == kept(whole)


def test_keep_refuses_unsupported_objects(tmp_path: Path) -> None:
    asked = Job(str(tmp_path / "job"), [1], {}, call="tests.engine.programs.keeping:refusals")
    assert run(asked) == [[0]], asked.output()
    said = json.loads((asked.path / "said").read_text())
    words = [
        "each thing needs a name of its own",
        "the dict is empty, and a resume fills what is there",
        "a int cannot be saved",
        "plain['x'] is a frozenset, which cannot be kept",
        "other tensors than in the checkpoint: kept.counts['more']",
        "nothing was refused",
    ]
    for one, expected in zip(said, words, strict=True):
        assert expected in one, one
    assert "WARNING: nothing of 'average' was saved there: it stays as it is" in asked.output()
