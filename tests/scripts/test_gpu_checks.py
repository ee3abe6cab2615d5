"""The checks for machines with CUDA: without it they say so; rehearsed, the script itself works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts/bench/gpu.py"
RUNS = "a loss with,profile,verify over"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_it_says_so() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "there is no CUDA here: nothing was checked\n"
    assert done.stdout == ""


def test_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    words = ["--rehearse", "--only", RUNS, "--json", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, SCRIPT, *words], text=True, check=False,
                          stdout=subprocess.PIPE)  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert len(found) == 3, done.stdout
    assert {name: seen for name, seen in found.items() if not seen["good"]} == {}
    assert done.returncode == 0
