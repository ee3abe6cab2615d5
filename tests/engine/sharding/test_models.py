"""Models as people build them, on several ranks with sharded parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.programs.models import BETWEEN_NODES, MODELS
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow


def trained(directory: Path, nodes: list[int]) -> tuple[Job, list[dict[str, Any]]]:
    call = "tests.engine.programs.models:hybrid_shard"
    job = Job(str(directory / "job"), nodes, {}, call=call)
    assert run(job) == [[0] * sum(nodes)], job.output()
    each = [json.loads((job.path / f"results_{n}").read_text()) for n in range(sum(nodes))]
    for results in each:
        for make in MODELS if nodes == [2] else BETWEEN_NODES:
            found = results[make.__name__]
            assert found[1:] == [0.0, MODELS[make]], (make, found)
            assert found[0] < 1e-5, (make, found)
    return job, each


def test_models_train_as_plain_loop_between_nodes(tmp_path: Path) -> None:
    trained(tmp_path, [2, 2])


def test_models_train_as_plain_loop(tmp_path: Path) -> None:
    job, each = trained(tmp_path, [2])
    for results in each:
        assert results["recomputed"] == [2] * 4
        for name in ("sparse", "hook"):
            assert 'strategy="ddp"' in results[name], (name, results[name])
        assert "a hook waits for the whole gradient of head.bias" in results["hook"]
        assert "0 has max_norm, so each rank would shorten the rows" in results["shortened"]
        assert max(results["sparse far"]) < 1e-6
        assert "the model has no repeated blocks" in results["nothing to recompute"]
    assert "gathered one at a time: 4 Block" in job.output()
