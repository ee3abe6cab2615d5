"""Hints: one sentence with numbers where the parts of a step carry it, and none elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.traces import overlap
from orchestrator.traces.rank import Rank
from orchestrator.views.profile.hint import Hint, hint

DDP = {"strategy": "ddp", "accumulate": 1, "built_in": True, "workers": 0}


def rank(compute: float, exposed: float = 0, data: float = 0, **more: Any) -> Rank:
    """Two steps, each with so many milliseconds of everything."""
    rests, hidden = more.pop("idle", 0), more.pop("hidden", 0)
    kinds = more.pop("kinds", {"gradients": exposed})
    return Rank(
        steps=2,
        window_ms=2 * (compute + exposed + data + rests),
        compute_ms=2 * compute,
        communication_ms=2 * (exposed + hidden),
        overlapped_ms=2 * hidden,
        exposed_ms=2 * exposed,
        copying_ms=0,
        idle_ms=2 * (data + rests),
        data_ms=2 * data,
        collectives=more.pop("collectives", {}),
        exposed_kinds={kind: 2 * value for kind, value in kinds.items()},
        **more,
    )


def of(*ranks: Rank, **about: Any) -> Hint | None:
    together = overlap.compare(dict(enumerate(ranks)))
    return hint(together, {**DDP, **about}, lambda number: f"rank {number} (host{number})")


def test_larger_accumulation_is_predicted() -> None:
    """62 ms to compute and 38 to send: two micro-batches take 162, four 286, eight 534."""
    found = of(rank(62, 38))
    assert found is not None
    assert found.text == (
        "exposed communication is 38% of the step (38 of 100 ms); gradient accumulation 8 instead"
        " of 1: predicted 7%, 1.5 times the samples per second (a step then counts 8 times as many)"
    )
    assert found.change == "--set training.gradient_accumulation=8"
    assert (found.step_ms, found.predicted_ms) == (100, pytest.approx(534))
    assert found.speedup == pytest.approx(8 * 100 / 534)


def test_it_is_as_large_as_it_needs_to_be() -> None:
    found = of(rank(80, 20), accumulate=2, built_in=False)
    assert found is not None
    assert "gradient accumulation 6" not in found.text
    assert "accumulation 8 instead of 2: predicted 6%" in found.text  # 4 x 40 + 20, 8 x 40 + 20
    assert found.change == "Trainer(accumulate=8)"
    found = of(rank(150, 25), accumulate=1)
    assert found is not None and "accumulation 2 instead of 1: predicted 8%" in found.text


@pytest.mark.parametrize(
    ("strategy", "whole", "kinds", "expected"),
    [
        ("ddp", False, {"gradients": 40}, 40),
        ("full_shard", False, {"parameters": 20, "scattered gradients": 20}, None),
        ("full_shard", True, {"parameters": 10, "scattered gradients": 30}, 30),
        ("hybrid_shard", False, {"gradients": 30, "scattered gradients": 10}, 30),
        ("hybrid_shard", True, {"gradients": 20, "scattered gradients": 10, "parameters": 9}, 30),
        ("", False, {"gradients": 40}, 40),  # a program of the user's own
        ("", False, {"gradients": 20, "parameters": 20}, None),
    ],
)
def test_what_is_paid_once_per_step(
    strategy: str, whole: bool, kinds: dict[str, float], expected: float | None
) -> None:
    found = of(rank(60, 40, kinds=kinds), strategy=strategy, sums_whole=whole)
    if expected is None:
        assert found is None or found.kind != "accumulation"
        return
    assert found is not None and found.kind == "accumulation"
    assert f"({expected} of 100 ms)" in found.text


def test_the_optimizer_is_paid_once_too() -> None:
    with_it, without = of(rank(60, 40, optimizer_ms=2 * 20.0)), of(rank(60, 40))
    assert with_it is not None and without is not None
    assert with_it.predicted_ms == pytest.approx(8 * 40 + 60)
    assert with_it.speedup > without.speedup


@pytest.mark.parametrize(
    ("workers", "waits", "words"),
    [
        (0, 20, "1 loader processes per rank instead of 0: predicted 80 ms, 1.2 times"),
        (0, 75, "3 loader processes per rank instead of 0: predicted 25 ms, 4 times"),
        (2, 50, "4 loader processes per rank instead of 2"),  # 200 ms of loading, 50 for it
        (8, 90, "would take 80 loader processes per rank: prepare the data"),
        (None, 20, "more loader processes: predicted 80 ms"),
        ("8; rm -rf", 20, "more loader processes"),
    ],
)
def test_more_loader_processes(workers: Any, waits: float, words: str) -> None:
    found = of(rank(100 - waits, 0, waits), workers=workers)
    assert found is not None and found.kind == "data"
    assert words in found.text
    assert "rm" not in found.text


def test_a_slow_rank_comes_before_what_it_causes() -> None:
    """Rank 1 computes 60 ms longer; rank 0 spends them in the all-reduce."""

    def collectives(start: float) -> dict[str, Any]:
        return {"all_reduce": tuple((at + start, at + 100.0) for at in (0, 100))}

    quick = rank(30, 70, collectives=collectives(30))
    slow = rank(90, 10, collectives=collectives(90))
    found = of(quick, slow)
    assert found is not None and found.kind == "slow rank"
    assert found.text == (
        "the others wait for rank 1 (host1) 60% of the step (60 of 100 ms); if it were as quick"
        " as they are: 40 ms, 2.5 times the samples per second (predicted)"
    )


def test_parameters_that_are_gathered_twice() -> None:
    shown = rank(60, 40, kinds={"parameters": 40})
    found = of(shown, strategy="full_shard", reshards=True)
    assert found is not None and found.kind == "gathering"
    assert "predicted 80 ms, 1.2 times" in found.text
    assert of(shown, strategy="full_shard", reshards=False) is None
    assert of(shown, strategy="shard_grad_op", reshards=True) is None


def test_a_gpu_that_waits_for_its_host() -> None:
    found = of(rank(50, idle=50, gpu=True))
    assert found is not None and found.kind == "idle"
    assert "at most 2 times the samples per second" in found.text
    assert of(rank(50, idle=50)) is None, "a CPU's idle time is no operation of torch's"


@pytest.mark.parametrize(
    "shown", [rank(100), rank(96, 4), rank(97, 0, 3), rank(0), rank(0, 100), rank(0, 0, 100)]
)
def test_nothing_is_said_where_nothing_carries_it(shown: Rank) -> None:
    assert of(shown) is None


def test_a_note_that_makes_no_sense_is_passed_over() -> None:
    found = of(rank(60, 40), accumulate="many", strategy=7, built_in="yes")
    assert found is not None and found.change == "Trainer(accumulate=8)"
