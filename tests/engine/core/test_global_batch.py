"""A job that goes on with another number of ranks keeps its batch, and so its curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestrator.config.schema import Config, Training
from orchestrator.engine.core.settings import VARIABLE, Share, in_words, keep_batch, share
from tests.engine.core.test_parity import accumulate, config, fsdp
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("first", "world", "accumulation", "size", "expected"),
    [
        (4, 4, 1, 8, Share(1, 8)),
        (4, 2, 1, 8, Share(2, 8)),
        (4, 1, 3, 8, Share(12, 8)),
        (3, 2, 2, 5, Share(3, 5)),  # six micro-batches, three on each
        (2, 4, 2, 8, Share(1, 8)),  # it has grown beyond its beginning
        (2, 4, 1, 8, Share(1, 4)),  # no half of a micro-batch, but a smaller one
        (4, 3, 1, 6, Share(2, 4)),  # 24 samples, eight on each rank
        (4, 3, 1, 8, Share(2, 5)),  # 32 samples: 30 are nearer than 24
        (4, 3, 4, 8, Share(6, 7)),  # 128 samples: 126 are nearer than 120
        (64, 63, 1, 8, Share(1, 8)),
        (13, 8, 1, 8, Share(2, 6)),  # 13 micro-batches of one sample would fit, slowly
        (2, 5, 1, 8, Share(1, 3)),  # 16 samples: 15 are nearer than 40
        (2, 3, 1, 8, Share(1, 5)),
        (1, 64, 1, 8, Share(1, 1)),
        (4, 2, 1, None, Share(2, None)),
        (4, 3, 1, None, Share(1, None)),
        (2, 4, 1, None, Share(1, None)),
    ],
)
def test_a_step_is_divided_anew(
    first: int, world: int, accumulation: int, size: int | None, expected: Share
) -> None:
    assert share(first, world, accumulation, size) == expected


@given(*(some.integers(1, 40) for _ in range(3)), some.none() | some.integers(1, 40))
def test_it_is_kept_where_the_micro_batches_divide(
    first: int, world: int, accumulation: int, size: int | None
) -> None:
    own = share(first, world, accumulation, size)
    assert own.accumulation >= 1
    assert (own.batch_size is None) is (size is None)
    assert (own.batch_size or 0) <= (size or 0)  # none that memory might not hold
    if first * accumulation % world == 0:
        assert own == Share(first * accumulation // world, size)
    off = abs(world * own.accumulation * (own.batch_size or 1) - first * accumulation * (size or 1))
    assert off <= world * (size or 1)
    if size is not None and world > first * accumulation:  # each can have one that is smaller
        assert off <= world / 2 or own == Share(1, 1)


def test_it_is_said_in_numbers() -> None:
    words = in_words(4, 2, 1, 8, Share(2, 8))
    assert words == (
        "2 ranks in place of 4: a step keeps its 32 samples, 2 micro-batches of 8 on each rank"
    )
    words = in_words(4, 3, 1, 8, Share(1, 8))
    assert words.startswith("WARNING: 3 ranks in place of 4 cannot share the 32 samples of a step")
    assert words.endswith("a step has 24 from now on, 1 micro-batch of 8 on each rank")
    assert "its 4 micro-batches, 2 micro-batches on each" in in_words(4, 2, 1, None, Share(2, None))


@pytest.mark.parametrize(
    ("first", "world", "loader", "before", "after"),
    [
        (4, 2, False, 3, 6),
        (2, 4, False, 3, 3),  # of half the size
        (4, 3, False, 3, 6),  # of 5 samples each
        (2, 3, False, 3, 3),  # of 5 samples each, not of 8
        (4, 2, True, 3, 6),
        (1, 8, True, 3, 1),
        (1, 8, True, None, None),  # all there are
    ],
)
def test_an_evaluation_sees_as_much_as_before(
    first: int,
    world: int,
    loader: bool,
    before: int | None,
    after: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its losses are those of other samples, and the best of all attempts is no best."""
    training = Training(batch_size=8, eval_steps=1, eval_batches=before)
    monkeypatch.setenv(VARIABLE, str(first))
    found = keep_batch(Config(training=training), world, lambda _: None, loader=loader)
    assert found.training.eval_batches == after
    monkeypatch.setenv(VARIABLE, str(world))
    same = Config(training=training)
    assert keep_batch(same, world, lambda _: None, loader=loader) == same


STEPS = 9


def part(directory: Path, name: str, nodes: list[int], *changes: dict[str, Any], attempt: int = 0,
         until: int = STEPS) -> Job:  # fmt: skip
    """One attempt of a job that began with four ranks; 0 is the run that nothing interrupts."""
    store = str(directory / ("disk" if attempt else "undisturbed"))
    wanted = config(
        *({"training": {"max_steps": until, "batch_size": 3}}, accumulate(1)),
        *({"scheduler": {"total_steps": STEPS}}, {"checkpoint": {"directory": store}}, *changes),
    )
    env = {VARIABLE: "4", "ORCHESTRATOR_ATTEMPT": str(attempt or 1)}
    return Job(str(directory / name), nodes, wanted, env)


def lines(job: Job, key: str) -> dict[int, Any]:
    return {line["step"]: line[key] for line in job.metrics() if key in line}


def samples(*attempts: Job) -> list[int]:
    """All samples that all ranks of all attempts have read."""
    files = [path for job in attempts for path in job.experiment().glob("read_*")]
    return sorted(int(line) for path in files for line in path.read_text().split())


def test_four_ranks_then_two_then_four(tmp_path: Path) -> None:
    """Losses, rates and samples of each step as if there had been four all the time."""
    data = {"dataset": {"target": "tests.engine.programs.configured:noted"}}
    whole = part(tmp_path, "whole", [2, 2], fsdp("full_shard"), data)
    one = part(tmp_path, "one", [2, 2], fsdp("full_shard"), data, attempt=1, until=3)
    two = part(tmp_path, "two", [2], fsdp("full_shard"), data, attempt=2, until=6)
    three = part(tmp_path, "three", [2, 2], fsdp("full_shard"), data, attempt=3)
    assert run(whole, one, two, three) == [[0] * 4, [0] * 4, [0] * 2, [0] * 4], two.output()
    assert "2 ranks in place of 4: a step keeps its 12 samples, 2 micro-batches of 3" in (
        two.output()
    )
    assert "in place of" not in whole.output() + one.output() + three.output()
    for key in ("loss", "grad_norm", "lr", "tokens"):
        expected, found = lines(whole, key), {}
        for each in (one, two, three):
            found |= lines(each, key)
        assert list(found) == list(expected) == list(range(1, STEPS + 1))
        assert found == pytest.approx(expected, abs=1e-5), key
    assert samples(one, two, three) == samples(whole)
    assert len(samples(whole)) == STEPS * 12
