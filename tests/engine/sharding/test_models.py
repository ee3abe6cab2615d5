"""Models as people build them, on several ranks with sharded parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.programs.models import MODELS, REFUSED
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


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
        assert results["recomputed"] == [2] * 4
        refused = ["aside", "sparse", *REFUSED]
        for name in refused:
            assert 'strategy="ddp"' in results[name], (name, results[name])
        assert "a hook waits for the whole gradient of head.bias" in results["hook"]
        assert "by something else than its output" in results["hidden"]
        assert "0 has max_norm, so each rank would shorten the rows" in results["shortened"]
        assert max(results["sparse far"]) < 1e-6
        assert "the model has no repeated blocks" in results["nothing to recompute"]
    assert "gathered one at a time: 4 Block" in job.output()


@pytest.mark.parametrize("nodes", [[2], [2, 2]])
def test_parameters_outside_their_block_are_refused(tmp_path: Path, nodes: list[int]) -> None:
    """Never half of a gradient."""
    call = "tests.engine.programs.models:outside"
    job = Job(str(tmp_path / "job"), nodes, {}, call=call)
    (codes,) = run(job)
    assert codes == [0] * sum(nodes), job.output()
    for rank in range(sum(nodes)):
        results = json.loads((job.path / f"results_{rank}").read_text())
        for name, refused in results.items():
            assert 'strategy="ddp"' in refused, (name, refused)
        assert "by something else than its output" in results["cached"]
        assert "would not be summed over the ranks" in results["gathered"]


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
        # ddp puts its buckets in another order after the first backward.
        ordered = strategy != "ddp" or sum(nodes) < 4
        assert of_a_resume == 0.0 if ordered else of_a_resume < 1e-6, strategy
