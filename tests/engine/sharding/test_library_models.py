"""Twenty models of transformers learn the same with sharded parameters as on one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.require import lacking
from tests.engine.programs.library_models import ADAPTED, MODELS
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

# Not pulled in by what the tests need; their own needs (torch, numpy, ...) are there already.
PACKAGES = ("transformers>=4.50", "tokenizers", "regex", "typer", "shellingham", "peft>=0.15")
# Their loss looks at the other samples of a batch, which is another one on each rank.
BY_BATCH = ("clip", "resnet")


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    directory = tmp_path / "libraries"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(directory)]
    done = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode:
        lacking(f"transformers cannot be installed: {done.stderr[-300:]}")
    return directory


def test_models_of_transformers_learn_the_same(tmp_path: Path, libraries: Path) -> None:
    results: list[dict[str, Any]] = []
    for nodes in ([1], [2]):
        job = Job(
            str(tmp_path / f"{nodes}"), nodes, {}, timeout=400.0,
            call="tests.engine.programs.library_models:all_of_them",
            env={"LIBRARIES": str(libraries), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        (codes,) = run(job)
        assert codes == [0] * sum(nodes), job.output()
        results.append(json.loads((job.path / "results_0").read_text()))
    alone, sharded = results
    for results_of in results:
        assert isinstance(results_of[ADAPTED], list), results_of[ADAPTED]
        expected, at_once, read, changed = results_of[ADAPTED]
        assert expected == at_once
        assert read == pytest.approx(expected, abs=1e-5)
        assert changed > 0.01
    assert alone[ADAPTED] == pytest.approx(sharded[ADAPTED], abs=1e-4)
    for name in MODELS:
        assert isinstance(alone[name], list), (name, alone[name])
        assert isinstance(sharded[name], list), (name, sharded[name])
        assert sharded[name][1] >= 1, name
        for losses in (alone[name], sharded[name]) if name != "clip" else (alone[name],):
            assert losses[3] == pytest.approx(losses[2], abs=1e-5), (name, "from_pretrained")
        if name not in BY_BATCH:
            assert sharded[name][0] == pytest.approx(alone[name][0], abs=1e-4), name
