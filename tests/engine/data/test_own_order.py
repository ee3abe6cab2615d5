"""Samplers and streams of a program's own: a resume goes on to the sample, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.programs.samplers import ELSEWHERE, NOT_ELSEWHERE, SAME
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

PROGRAMS = "tests.engine.programs.samplers"


def results(job: Job, ranks: int) -> list[dict[str, Any]]:
    (codes,) = run(job)
    assert codes == [0] * ranks, job.output()
    return [json.loads((job.path / f"results_{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (2, 2)])
def test_a_resume_on_the_same_ranks_goes_on_to_the_sample(
    tmp_path: Path, ranks: int, workers: int
) -> None:
    env = {"WORKERS": str(workers)}
    job = Job(str(tmp_path / "job"), [ranks], {}, env, call=f"{PROGRAMS}:samplers")
    for rank, found in enumerate(results(job, ranks)):
        # The state of a stream stays in the workers, which have more than one order.
        kinds = [kind for kind in SAME if not workers or "StatefulFlow" not in kind]
        assert {kind: found[kind] for kind in kinds} == dict.fromkeys(kinds, ["same"] * 3)
        within, again, after = found["another"]
        assert "epoch 0, whose samples were drawn by OwnGenerator on" in within
        assert "is not known to Another on" in within and 'save_every="1 epoch"' in within
        assert "CheckFailed" in again and after in ("same", "DIFFERS")
        if not workers:
            # What is asked for a batch has heard of the step before.
            assert found["as drawn"][:2] == [[5, 10, 3, 8][rank::ranks], [2, 7, 0, 5][rank::ranks]]
            assert found["read"] == 12 * 3 - 8


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_resume_on_other_ranks_needs_a_state_or_our_sampler(
    tmp_path: Path, first: int, then: int
) -> None:
    env = {"WORKERS": "0"}
    began = Job(str(tmp_path), [first], {}, env, call=f"{PROGRAMS}:elsewhere")
    whole = together(results(began, first))
    resumed = Job(str(tmp_path), [then], {}, {**env, "STEP": "4"}, call=f"{PROGRAMS}:elsewhere")
    found = results(resumed, then)
    for kind in ELSEWHERE:
        assert together(found)[kind] == whole[kind][4:], kind
    for kind in NOT_ELSEWHERE:
        for own in found:
            assert f"drawn by {kind.removeprefix('own ')} on {first} ranks" in own[kind]
            assert f"is not known to {kind.removeprefix('own ')} on {then} ranks" in own[kind]
            assert "give it state_dict() and load_state_dict()" in own[kind]
    between = Job(str(tmp_path), [then], {}, {**env, "STEP": "6"}, call=f"{PROGRAMS}:elsewhere")
    found = results(between, then)
    for kind in (*ELSEWHERE, *NOT_ELSEWHERE):
        assert len(together(found)[kind]) == 3, kind


def together(found: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the samples of each step over all ranks."""
    return {
        kind: [sorted(x for part in step for x in part) for step in zip(*steps, strict=True)]
        for kind in found[0]
        if not isinstance((steps := [own[kind] for own in found])[0], str)
    }
