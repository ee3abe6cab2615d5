"""The checks for machines with CUDA: without it they say so; rehearsed, the script itself works."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from tests.typed import typed

SCRIPT = Path(__file__).parents[2] / "scripts/bench/gpu.py"


def run(place: Path, *words: str) -> tuple[int, str, str]:
    def main() -> None:
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return typed(words, place, main, str(SCRIPT))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_gpu_checks_without_cuda_exit_3(tmp_path: Path) -> None:
    assert run(tmp_path) == (3, "", "there is no CUDA here: nothing was checked\n")


@pytest.mark.slow
def test_gpu_checks_rehearse_on_cpu(tmp_path: Path) -> None:
    """Among them nanoGPT's own train.py, as it is, which continues from its checkpoint."""
    words = ["--only", "A LOSS with,nanoGPT", "--json", "found.json"]
    code, table, _ = run(tmp_path, "--rehearse", *words)
    found = json.loads((tmp_path / "found.json").read_text())["checks"].values()
    assert (code, [seen["good"] for seen in found]) == (0, [True, True]), table
    assert "| a loss with tensors of its own | " in table
