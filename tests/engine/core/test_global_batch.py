"""A job that goes on with another number of ranks keeps its batch, and so its curve."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.schema import Config, TrainingConfig
from orchestrator.engine.core.settings import VARIABLE, keep_batch
from tests.engine.core.test_parity import accumulate, config, fsdp
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("first", "world", "accumulation", "expected", "words"),
    [
        (4, 4, 1, 1, ""),
        (4, 2, 1, 2, "2 ranks in place of 4: a step has 2 micro-batches of each, 4 as before"),
        (3, 2, 2, 3, "6 as before"),
        (2, 4, 2, 1, "4 as before"),
        (4, 3, 4, 5, "WARNING: 3 ranks in place of 4"),
        (2, 5, 1, 1, "5 and not 2 as before"),
    ],
)
def test_keep_batch_divides_step_among_other_ranks(
    first: int, world: int, accumulation: int, expected: int, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An evaluation as well: else the best of all attempts is no best."""
    said: list[str] = []
    training = TrainingConfig(gradient_accumulation=accumulation, eval_steps=1, eval_batches=6)
    monkeypatch.setenv(VARIABLE, str(first))
    found = keep_batch(Config(training=training), world, said.append).training
    assert found.gradient_accumulation == expected
    assert found.eval_batches == round(6 * first / world)
    assert words in "".join(said)


STEPS = 6


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


def test_curve_is_same_on_four_ranks_then_two_then_four(tmp_path: Path) -> None:
    """Losses, rates and samples of each step as if there had been four all the time."""
    data = {"dataset": {"target": "tests.engine.programs.configured:noted"}}
    whole = part(tmp_path, "whole", [2, 2], fsdp("full_shard"), data)
    one = part(tmp_path, "one", [2, 2], fsdp("full_shard"), data, attempt=1, until=2)
    two = part(tmp_path, "two", [2], fsdp("full_shard"), data, attempt=2, until=4)
    three = part(tmp_path, "three", [2, 2], fsdp("full_shard"), data, attempt=3)
    assert run(whole, one, two, three) == [[0] * 4, [0] * 4, [0] * 2, [0] * 4], two.output()
    assert "2 ranks in place of 4: a step has 2 micro-batches of each, 4 as before" in (
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
