"""Weights from safetensors: each rank reads its rows, and no rank ever holds a whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.engine import own
from tests.engine.core.test_parity import config
from tests.engine.large import BLOCKS, WIDTH
from tests.engine.worlds import Job, run

WHOLE = BLOCKS * WIDTH * WIDTH * 4  # bytes


@pytest.mark.parametrize("nodes", [[2], [1]])
def test_a_model_is_never_whole_on_a_rank(tmp_path: Path, nodes: list[int]) -> None:
    job = Job(str(tmp_path / "job"), nodes, {}, call="tests.engine.large:sharded_from_files")
    (codes,) = run(job)
    assert codes == [0] * sum(nodes), job.told()
    for rank in range(sum(nodes)):
        told = json.loads((job.path / f"told_{rank}").read_text())
        assert told["right"]
        assert told["shift"] == [2.0] * 3
        assert max(told["same"]) < 1e-6
        for said, words in zip(
            told["refused"],
            ("say where they are: weights=", "lacks 1 of the model's tensors, such as bias",
             "weight has the shape (3, 5)", "is not a safetensors file", "cannot be read"),
            strict=True,
        ):  # fmt: skip
            assert words in said
        # Its own part, and what two blocks and the allocator take.
        assert told["taken"] < WHOLE / sum(nodes) + WHOLE / 4


def test_a_models_function_may_leave_its_memory_to_the_engine(tmp_path: Path) -> None:
    """Made on the meta device or not, it begins with the same weights; without a file, never."""
    file = tmp_path / "model.safetensors"
    save_file(own.model().state_dict(), file)

    def job(function: str, **more: str) -> Job:
        model = {"model": {"target": f"tests.engine.own:{function}", **more}}
        short = {"training": {"max_steps": 2}}
        return Job(str(tmp_path / f"{function}{len(more)}"), [2], config(short, model, world=2))

    jobs = [job("model", weights=str(file)), job("without_memory", weights=str(file))]
    refused = job("without_memory")
    assert run(*jobs, refused) == [[0, 0], [0, 0], [1, 1]], refused.told()
    first, second = ([line["loss"] for line in one.metrics()] for one in jobs)
    assert first == second
    assert "name a file with its weights: model.weights" in refused.told()
