from __future__ import annotations

import subprocess
import sys

from torch import nn

from orchestrator.engine.sharding import mesh


def test_what_fsdp_replaces_is_left_where_it_was() -> None:
    """On a GPU it would be a whole copy of the model, for as long as an optimizer holds it."""
    module = nn.Linear(2, 2)
    weight, bias = module.weight, module.bias
    before, moved = weight.data_ptr(), 0
    with mesh.left_where_they_were(module):
        for parameter in module.parameters():
            # FSDP moves it to the device in the same way.
            parameter.data = parameter.data.clone()
        moved = bias.data_ptr()
        # This is its shard; the bias is kept whole.
        module.weight = nn.Parameter(weight.data[:1])
    assert weight.data_ptr() == before
    assert bias.data_ptr() == moved
    assert module.weight.shape == (1, 2)


def test_an_older_torch_is_named() -> None:
    program = "import torch; torch.__version__ = '2.5.1'; from orchestrator import Trainer"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert "CheckFailed: the engine needs torch 2.8, here is 2.5.1" in done.stderr, done.stderr
