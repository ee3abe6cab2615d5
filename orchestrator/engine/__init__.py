"""The training engine and the Trainer, which run on every rank."""

import importlib.util
import sys

import torch

from orchestrator.common.errors import CheckFailed

# These checks come before any import that an older torch does not have.
if [int(number) for number in torch.__version__.split(".")[:2]] < [2, 8]:
    raise CheckFailed(f"the engine needs torch 2.8 or later, and this is {torch.__version__}")
if importlib.util.find_spec("numpy") is None:
    raise CheckFailed(
        f"the engine needs numpy beside torch, and {sys.executable} has none",
        "torch's collectives of objects, and so its checkpoints, use it: pip install numpy",
    )
