"""Models as people build them, on several ranks with sharded parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.programs.models import MODELS, REFUSED
from tests.engine.worlds import Job, run


@pytest.mark.parametrize("nodes", [[2], [2, 2]])
def test_models_train_as_in_a_plain_loop(tmp_path: Path, nodes: list[int]) -> None:
    call = "tests.engine.programs.models:hybrid_shard"
    job = Job(str(tmp_path / "job"), nodes, {}, call=call)
    (codes,) = run(job)
    assert codes == [0] * sum(nodes), job.output()
    for rank in range(sum(nodes)):
        results = json.loads((job.path / f"results_{rank}").read_text())
        for make, groups in MODELS.items():
            found = results[make.__name__]
            assert found[1:] == [0.0, groups], (make, found)
            assert found[0] < 1e-5, (make, found)
        before, after = results["later hooks"]
        assert len(before) == 1
        assert before == after
        assert results["recomputed"] == [2] * 4
        refused = ["aside", "sparse", *REFUSED]
        for name in refused:
            assert 'strategy="ddp"' in results[name], (name, results[name])
        assert "blocks.0 gives a Result, in which" in results["hidden"]
        assert "head.weight was changed in the forward" in results["shrinking"]
        assert "0 has max_norm, so each rank would shorten the rows" in results["shortened"]
        assert max(results["sparse far"]) < 1e-6
        assert "the model has no repeated blocks" in results["nothing to recompute"]
    assert "gathered one at a time: 4 Block" in job.output()


@pytest.mark.parametrize("nodes", [[2], [2, 2]])
def test_parameters_outside_their_block_are_refused_or_right(
    tmp_path: Path, nodes: list[int]
) -> None:
    """Never half of a gradient, nor the weights themselves in place of what was given for them."""
    call = "tests.engine.programs.models:outside"
    job = Job(str(tmp_path / "job"), nodes, {}, call=call)
    (codes,) = run(job)
    assert codes == [0] * sum(nodes), job.output()
    for rank in range(sum(nodes)):
        results = json.loads((job.path / f"results_{rank}").read_text())
        assert "cannot be copied by copy.deepcopy()" in results.pop("copied")[0]
        for name, (refused, distance) in results.items():
            assert "find_unused_parameters=True" in refused, (name, refused)
            assert distance < 1e-5, (name, distance)
        assert ".weight was replaced, as torch.func.functional_call() does" in results["doubled"][0]
        assert "by something else than its output" in results["cached"][0]
        assert "would not be summed over the ranks" in results["gathered"][0]


@pytest.mark.parametrize("nodes", [[1], [2], [2, 2]])
def test_weights_that_are_made_of_other_tensors(tmp_path: Path, nodes: list[int]) -> None:
    call = "tests.engine.programs.quantised:quantised"
    job = Job(str(tmp_path / "job"), nodes, {}, call=call)
    (codes,) = run(job)
    assert codes == [0] * sum(nodes), job.output()
    found, *kinds, refused = json.loads((job.path / "results_0").read_text())
    assert kinds == ["Quantised", "Tensor", "Tensor"]
    assert "layers.0.weight is a Quantised, which safetensors files cannot hold" in refused
    for strategy, (of_a_loop, of_a_resume) in found.items():
        assert of_a_loop < 1e-5, strategy
        assert of_a_resume == 0.0, strategy
