"""The training engine and the Trainer, which run on every rank."""

import torch

from orchestrator.common.errors import CheckFailed

# This check comes before any import that an older torch does not have.
if [int(number) for number in torch.__version__.split(".")[:2]] < [2, 8]:
    raise CheckFailed(f"the engine needs torch 2.8, here is {torch.__version__}")
