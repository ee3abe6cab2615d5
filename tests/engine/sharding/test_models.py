"""Models as people build them, on several ranks with sharded parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.programs.models import MODELS
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
        for name in ("sparse", "hook"):
            assert 'strategy="ddp"' in results[name], (name, results[name])
        assert "a hook waits for the whole gradient of head.bias" in results["hook"]
        assert "0 has max_norm, so each rank would shorten the rows" in results["shortened"]
        assert max(results["sparse far"]) < 1e-6
        assert "the model has no repeated blocks" in results["nothing to recompute"]
    assert "gathered one at a time: 4 Block" in job.output()
