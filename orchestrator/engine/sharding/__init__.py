"""How a model is spread over the ranks: its blocks, their order, their copies."""

import torch
from torch.distributed import fsdp

from orchestrator.common.errors import CheckFailed

# Before any module of this room imports what an older torch does not have.
if not hasattr(getattr(fsdp, "FSDPModule", None), "set_gradient_divide_factor"):
    raise CheckFailed(f"the engine needs torch 2.8, here is {torch.__version__}")
