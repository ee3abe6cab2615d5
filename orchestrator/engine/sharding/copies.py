"""Train a copy of the model on each rank with DistributedDataParallel (ddp); choose dtypes."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from orchestrator.common.errors import UsageError
from orchestrator.config.schema import Config, FsdpConfig
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.sharding.blocks import OTHER_PARTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(low: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of a precision; it is the same for every strategy."""
    return contextlib.nullcontext() if low == "fp32" else torch.autocast(device.type, DTYPES[low])


def mixed_precision(fsdp: FsdpConfig, module: nn.Module) -> MixedPrecisionPolicy:
    """Return FSDP's dtypes for gathering and summing a module; fp64 is never rounded."""
    finer = any(parameter.dtype is torch.float64 for parameter in module.parameters())
    gathers = fsdp.param_dtype == "bf16" and not finer
    reduce_dtype = fsdp.reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if gathers else None,
        reduce_dtype=torch.float64 if finer and reduce_dtype == "fp32" else DTYPES[reduce_dtype],
        cast_forward_inputs=False,
    )


class Called(nn.Module):
    """Computes any function of a model as one forward, because ddp only supports forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        return compute(self.model)


class Copies(DistributedDataParallel):
    """DistributedDataParallel that sums gradients, and checks that it has summed all of them."""

    module: Called

    def __init__(self, model: nn.Module, ranks: Ranks, config: Config) -> None:
        keys = config.distributed
        # A static graph must be summed in the first micro-batch. With several micro-batches, only
        # the last one is summed.
        static = keys.static_graph and config.training.gradient_accumulation == 1
        # With find_unused_parameters ddp keeps its first buckets. Otherwise it reorders them after
        # the first backward, and the rounding of a sum over three ranks depends on that order.
        looks = keys.find_unused_parameters or config.training.deterministic
        with warnings.catch_warnings():
            # torch 2.13 deprecates broadcast_buffers, but older versions lack its replacement.
            warnings.filterwarnings("ignore", ".?broadcast_buffers", FutureWarning)
            super().__init__(
                Called(model),
                device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
                bucket_cap_mb=keys.bucket_cap_mb,
                gradient_as_bucket_view=keys.gradient_as_bucket_view,
                static_graph=static,
                find_unused_parameters=looks or keys.static_graph != static,
                broadcast_buffers=keys.broadcast_buffers,
            )
        self.summed_all = False
        self.register_comm_hook(self, sum_bucket)

    @contextlib.contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Sum gradients in the last micro-batch of a step; refuse a step with unused parameters."""
        self.summed_all = False
        with contextlib.nullcontext() if last else self.no_sync():
            yield
        checked = last and not (self.find_unused_parameters or self.static_graph)
        if checked and not self.summed_all:
            # torch reports this only in the next forward.
            named = self.module.model.named_parameters()
            without = [name for name, parameter in named if parameter.grad is None]
            example = f", such as {without[0]}" if without else ""
            raise UsageError(
                f"the step did not use all parameters of the model{example}", OTHER_PARTS
            )


# ddp compares annotations with its own, so there are none.
def sum_bucket(copies, bucket):  # type: ignore[no-untyped-def]
    """Sum a bucket's gradients over the ranks, as a comm hook.

    ddp averages by default, but all strategies here scale the loss in the same way and sum.
    """
    copies.summed_all = bucket.is_last()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    total: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return total
