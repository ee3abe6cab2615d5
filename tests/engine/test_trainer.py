"""The Trainer's numbers are those of a plain loop, whatever it runs on; and it can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from tests.engine import trained
from tests.engine.worlds import Job, run

WORLDS = ([1], [2], [2, 2])


def done(place: Path, name: str, nodes: list[int], function: str, **more: Any) -> Job:
    job = Job(str(place / name), nodes, {}, call=f"tests.engine.trained:{function}", **more)
    (codes,) = run(job)
    told = "\n".join(job.told(rank) for rank in range(sum(nodes)))
    assert codes == [0] * sum(nodes), told
    return job


def plain_loop() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """One process, one batch per step as large as all micro-batches of all ranks."""
    model, data = trained.net(), trained.samples()
    optimizer = trained.warmed(model)
    order = DistributedSampler(data, 1, 0, seed=0)
    rows = trained.BATCH * trained.ACCUMULATE
    history, steps = [], 0
    for epoch in range(trained.EPOCHS):
        order.set_epoch(epoch)
        places = list(order)
        loss_sum = right = count = 0.0
        for first in range(0, len(places), rows):
            x, y = data[places[first : first + rows]]
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), trained.CLIP)
            steps += 1
            for group, lr in zip(optimizer.param_groups, (0.05, 0.02), strict=True):
                group["lr"] = lr * min(1.0, steps / 3)
            optimizer.step()
            optimizer.zero_grad()
            kept = int((y >= 0).sum())
            loss_sum, count = loss_sum + loss.item() * kept, count + kept
            right += int((out.argmax(-1) == y)[y >= 0].sum())
        x, y = trained.samples(13)[:]
        with torch.no_grad():
            out = model(x)
        history.append(
            {
                "epoch": epoch + 1,
                "step": steps,
                "train_loss": loss_sum / count,
                "train_correct": right / count,
                "val_loss": nn.functional.cross_entropy(out, y).item(),
                "val_correct": (out.argmax(-1) == y)[y >= 0].float().mean().item(),
            }
        )
    return {name: p.detach() for name, p in model.named_parameters()}, history


def test_every_strategy_computes_what_a_plain_loop_does(tmp_path: Path) -> None:
    expected, history = plain_loop()
    for nodes in WORLDS:
        job = done(tmp_path, f"world{sum(nodes)}", nodes, "every_strategy")
        found = torch.load(job.path / "found")
        assert found.keys() >= set(trained.MORE)
        for strategy, (parameters, told) in found.items():
            for name, value in expected.items():
                torch.testing.assert_close(
                    parameters[name], value, atol=1e-5, rtol=0, msg=f"{nodes} {strategy} {name}"
                )
            for one, other in zip(told, history, strict=True):
                assert one == pytest.approx(other, abs=1e-5), (nodes, strategy)


def test_a_resume_has_the_bits_of_a_run_that_was_never_interrupted(tmp_path: Path) -> None:
    job = done(tmp_path, "two", [2], "resumes")
    assert "resuming after step 3" in job.told()
    assert "nothing to do: 3 epochs and 9 steps are done" in job.told()


DEALT = {
    "in order": [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9]]],
    "drops": [[[0, 2], [4, 6]], [[1, 3], [5, 7]]],
    "batches": [[[0, 1, 2], [4, 5]], [[3], [0, 1, 2]]],
    "whole": [[[0], [2], [4], [6], [8], [10]], [[1], [3], [5], [7], [9], [0]]],
    "stream": [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]],
    "own stream": [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9]]],
    "list": [[[0], [2], [4]], [[1], [3], [3]]],
}


def test_every_kind_of_loader_is_dealt_out_and_said(tmp_path: Path) -> None:
    job = done(tmp_path, "loaders", [2], "loaders")
    ranks = [json.loads((job.path / f"seen_{rank}").read_text()) for rank in range(2)]
    for name, expected in DEALT.items():
        assert [rank[name]["seen"] for rank in ranks] == [own * 2 for own in expected], name
    totals = {"drops": 28 / 8, "batches": 15 / 6, "list": 10 / 5}
    for name, found in ranks[0].items():
        # Nothing is counted twice or left out, though some ranks see a batch that counts as none;
        # torch's own sampler shows one sample twice, which is said.
        if name == "kept":
            continue
        assert found["means"] == pytest.approx([totals.get(name, 55 / 11)] * 2), name
    for name in ("shuffled, with workers", "random", "kept"):
        half = len(ranks[0][name]["seen"]) // 2
        seen = [[batch for r in ranks for batch in r[name]["seen"][e:][:half]] for e in (0, half)]
        assert {n for batch in seen[0] for n in batch} == set(range(11)), name
        assert seen[0] != seen[1], name  # another epoch, another order
    told = job.told()
    for words in (
        "11 samples, in their order, dealt out to 2 ranks",
        "11 samples, shuffled by seed 0 and epoch, dealt out to 2 ranks",
        "11 samples, as rank 0's WeightedRandomSampler draws them in each epoch, dealt out",
        "12 samples by your DistributedSampler, epochs are set; it shows 1 of them twice",
        "every rank reads all of it and keeps each 2th",
        "every rank takes its own stream as its part",
    ):
        assert words in told


def test_what_cannot_be_right_is_refused_on_all_ranks(tmp_path: Path) -> None:
    job = done(tmp_path, "refuses", [2], "refuses")
    for rank in range(2):
        told = json.loads((job.path / f"told_{rank}").read_text())
        for name, words in {
            "none": "strategy='none' is for one process, and here are 2",
            "dp": "strategy='dp' is for one process",
            "other": "the model is not the same on all ranks",
            "sampler": "it is made for rank 0 of 3",
            "streams": "the ranks read different streams",
            "short": "fewer batches than there are ranks",
            "absent": "there is no checkpoint in",
            "nan": "10 steps in a row had NaN or inf",
        }.items():
            assert words in told[name], (rank, name)
    assert not (job.path / "no").exists()
