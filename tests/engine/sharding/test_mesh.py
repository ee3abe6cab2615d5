from __future__ import annotations

import subprocess
import sys


def test_an_older_torch_is_named() -> None:
    program = "import torch; torch.__version__ = '2.5.1'; from orchestrator import Trainer"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert "CheckFailed: the engine needs torch 2.8, here is 2.5.1" in done.stderr, done.stderr
