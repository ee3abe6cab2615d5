"""Samplers and streams of a program's own: a resume goes on to the sample, or is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.programs.samplers import ELSEWHERE, FEW, NOT_ELSEWHERE, SAME
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

PROGRAMS = "tests.engine.programs.samplers"


def results(job: Job) -> list[Any]:
    (ranks,) = job.nodes
    assert run(job) == [[0] * ranks], job.output()
    return [json.loads((job.path / f"results_{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "workers", "kinds"), [(2, 0, SAME), (1, 2, FEW)], ids=["two ranks", "workers"]
)
def test_resume_on_same_ranks_continues_own_order(
    tmp_path: Path, ranks: int, workers: int, kinds: tuple[str, ...]
) -> None:
    env = {"WORKERS": str(workers), "KINDS": ",".join(kinds)}
    job = Job(str(tmp_path / "job"), [ranks], {}, env, call=f"{PROGRAMS}:samplers")
    for rank, found in enumerate(results(job)):
        assert {kind: found[kind] for kind in kinds} == dict.fromkeys(kinds, ["same"] * 2)
        within, after = found["another"]
        assert "epoch 1, whose samples were drawn by OwnGenerator on" in within
        assert "is not known to Another on" in within and 'save_every="1 epoch"' in within
        assert after in ("same", "DIFFERS")
        if not workers:
            # What is asked for a batch has heard of the step before.
            assert found["as drawn"][:2] == [[5, 10, 3, 8][rank::ranks], [2, 7, 0, 5][rank::ranks]]
        if "read" in found:
            assert found["read"] == 12 * 3 - 16


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_resume_on_other_ranks_needs_state_or_known_sampler(
    tmp_path: Path, first: int, then: int
) -> None:
    began = Job(str(tmp_path), [first], {}, call=f"{PROGRAMS}:elsewhere")
    whole = together([whole for (whole,) in results(began)])
    resumed = Job(str(tmp_path), [then], {}, {"RESUMED": "1"}, call=f"{PROGRAMS}:elsewhere")
    within, between = zip(*results(resumed), strict=True)
    for kind in ELSEWHERE:
        assert together(within)[kind] == whole[kind][4:], kind
    for kind in NOT_ELSEWHERE:
        for own in within:
            assert f"drawn by {kind.removeprefix('own ')} on {first} ranks" in own[kind]
            assert f"is not known to {kind.removeprefix('own ')} on {then} ranks" in own[kind]
            assert "give it state_dict() and load_state_dict()" in own[kind]
    for kind in (*ELSEWHERE, *NOT_ELSEWHERE):
        assert len(together(between)[kind]) == 3, kind


def together(found: Sequence[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the samples of each step over all ranks."""
    return {
        kind: [sorted(x for part in step for x in part) for step in zip(*steps, strict=True)]
        for kind in found[0]
        if not isinstance((steps := [own[kind] for own in found])[0], str)
    }
