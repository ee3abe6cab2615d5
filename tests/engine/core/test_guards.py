"""Faults of a run and their handling: NaN, signals, budgets, unequal nodes, bad models."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.engine.core.test_parity import BATCH, STEPS, accumulate, config, fsdp
from tests.engine.worlds import CONFIGURED, Job, run

pytestmark = pytest.mark.slow

ENDLESS = {"training": {"max_steps": 10**6}, "scheduler": {"total_steps": 100}}


def job(directory: Path, name: str, nodes: list[int], *changes: dict[str, Any], **more: Any) -> Job:
    return Job(str(directory / name), nodes, config(*changes, world=sum(nodes)), **more)


def broken(*samples: int) -> dict[str, Any]:
    """In the order of the files: samples 24 to 47 are those of step 2."""
    return {"dataset": {"args": {"broken": list(samples)}, "shuffle": False}}


def test_step_with_nan_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    """Nothing of it stays: neither in the weights nor in the optimizer. The next steps are finite
    and the culprits are named by the rank that had them."""
    first = job(tmp_path, "a", [2, 2], accumulate(2), broken(BATCH + 1, 3 * BATCH))
    assert run(first) == [[0] * 4]
    lines = first.metrics()
    assert [line["loss"] is None for line in lines] == [n in (1, 3) for n in range(STEPS)]
    assert [line["skipped_steps"] for line in lines][-1] == 2
    assert [line["left_s"] is not None for line in lines] == [False, *[True] * (STEPS - 2), False]
    results = "".join(first.output(rank) for rank in range(4))
    named = list(range(BATCH, BATCH + BATCH // 2 // 4))
    assert results.count(f"step 2 is skipped on all ranks: NaN or inf in samples {named}") == 1
    assert all(line["grad_norm"] < 10 for line in lines if line["grad_norm"] is not None)
    # As if the optimizer had never seen them.
    assert lines[2]["loss"] == pytest.approx(skipping_by_hand(tmp_path), abs=1e-6)


def skipping_by_hand(directory: Path) -> float:
    """The loss of step 3 after step 1 alone: step 2's samples are exchanged for step 3's."""
    once = {"training": {"max_steps": 2}, "scheduler": {"total_steps": STEPS}}
    swapped = {"dataset": {"target": "tests.engine.core.test_guards:without_step_two"}}
    other = job(directory, "b", [2, 2], accumulate(2), once, broken(), swapped)
    assert run(other) == [[0] * 4]
    loss: float = other.metrics()[1]["loss"]
    return loss


def without_step_two(split: str, broken: list[int]) -> Any:
    from torch.utils.data import Subset

    from tests.engine.programs.configured import uneven

    whole = uneven(split)
    order = [*range(BATCH), *range(2 * BATCH, len(whole))] if split == "train" else range(37)
    return Subset(whole, list(order))


def test_half_precision_scales_and_learns(tmp_path: Path) -> None:
    bf16 = {"sharding_strategy": "full_shard", "param_dtype": "bf16"}
    jobs = [
        job(tmp_path, low, [2], {
            "training": {"mixed_precision": low, "max_steps": 20}, "logging": {"interval": 5},
            "fsdp": how})
        for low, how in (("fp32", {}), ("fp16", {}), ("bf16", bf16))
    ]  # fmt: skip
    assert run(*jobs) == [[0, 0]] * 3
    ends = [one.metrics()[-1]["loss"] for one in jobs]
    assert max(ends) < 0.97 * jobs[0].metrics()[0]["loss"]
    assert ends == pytest.approx([ends[0]] * 3, rel=0.03)
    assert len(set(ends)) == 3, "each computes in other bits"
    norms = [one.metrics()[-1]["grad_norm"] for one in jobs]
    # Gradients are unscaled before clipping.
    assert norms == pytest.approx([norms[0]] * 3, rel=0.1)


def test_stop_on_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    one = job(tmp_path, "a", [2, 2], ENDLESS, signal=signal.SIGTERM)
    assert run(one) == [[0] * 4]
    steps = {one.metrics(rank)[-1]["step"] for rank in range(4)}
    assert len(steps) == 1
    last = steps.pop()
    assert f"asked to stop (step {last})\n" in one.output()
    kept = one.experiment() / f"outputs/checkpoints/step_{last:08d}/manifest.json"
    assert kept.exists()


def test_clocks_start_evaluations_and_checkpoints(tmp_path: Path) -> None:
    clocks = {"training": {"max_steps": 15, "eval_seconds": 0.1},
              "checkpoint": {"seconds": 0.1, "keep": 100}}  # fmt: skip
    one = job(tmp_path, "a", [2], clocks)
    assert run(one) == [[0, 0]]
    evaluations = [line["step"] for line in one.metrics() if "eval_loss" in line]
    assert evaluations == [line["step"] for line in one.metrics(1) if "eval_loss" in line]
    saved = list((one.experiment() / "outputs/checkpoints").glob("step_*"))
    times = [line["time"] for line in one.metrics()]
    for each in (evaluations, saved):
        assert 1 <= len(each) <= (times[-1] - times[0]) / 0.1 + 2


def test_evaluation_keeps_checkpoint_due_by_clock(tmp_path: Path) -> None:
    clocks = {"training": {"eval_steps": 1},
              "checkpoint": {"seconds": 1e-9, "keep": 100}}  # fmt: skip
    one = job(tmp_path, "a", [2], clocks)
    assert run(one) == [[0, 0]]
    saved = list((one.experiment() / "outputs/checkpoints").glob("step_*"))
    assert len(saved) >= STEPS - 2


def test_evaluation_counts_each_sample_once_on_any_layout(tmp_path: Path) -> None:
    often = {"training": {"eval_steps": 3, "batch_size": 4}}
    jobs = [
        job(tmp_path, "alone", [1], often, {"training": {"batch_size": 12}}),
        job(tmp_path, "two", [2], often, fsdp("full_shard"), {"training": {"batch_size": 6}}),
        job(tmp_path, "three", [3], often, fsdp("ddp")),
    ]
    assert [code for codes in run(*jobs) for code in codes] == [0] * 6
    found = [
        [(line["eval_loss"], line["eval_correct"]) for line in one.metrics() if "eval_loss" in line]
        for one in jobs
    ]
    assert len(found[0]) == 2
    for other in found[1:]:
        for (loss, correct), (own_loss, own_correct) in zip(found[0], other, strict=True):
            assert own_loss == pytest.approx(loss, abs=1e-5)
            assert own_correct == correct
    assert "held out after step 3: loss" in jobs[0].output()


@pytest.mark.parametrize(
    ("nodes", "how", "words"),
    [
        ([1, 2, 3], {}, "all nodes need the same number of ranks; here they have 1, 2, 3"),
        ([2, 2], fsdp("hybrid_shard", shard_size=3), "which does not divide the 4 ranks"),
        ([1, 2, 1], fsdp("hybrid_shard", shard_size=2), "across the edge between nodes 0 and 1"),
        (
            [2],
            {"model": {"target": f"{CONFIGURED}:shortens"}},
            "the model has max_norm",
        ),
        ([2], fsdp("hybrid_shard", wrap=["Layer"]), "no module of that class; did you mean"),
    ],
)
def test_all_ranks_refuse_impossible_config(
    tmp_path: Path, nodes: list[int], how: dict[str, Any], words: str
) -> None:
    one = job(tmp_path, "a", nodes, how, {"training": {"batch_size": 2}})
    assert run(one) == [[1] * sum(nodes)]
    for rank in range(sum(nodes)):
        assert words in one.output(rank)
