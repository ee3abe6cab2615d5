"""Train a whole copy of the model on each rank, with torch's DistributedDataParallel (ddp)."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.common.errors import UsageError
from orchestrator.config.schema import Config
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.sharding.refusals import OTHER_PARTS


class Called(nn.Module):
    """A model of which any function is computed as one forward, which is all that ddp sees."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        return compute(self.model)


class Copies(DistributedDataParallel):
    """ddp that sums the gradients over the ranks, and knows whether it has summed all of them."""

    module: Called

    def __init__(self, model: nn.Module, ranks: Ranks, config: Config) -> None:
        keys = config.distributed
        # A static graph has to be summed in the first micro-batch, which one of several is not.
        static = keys.static_graph and config.training.gradient_accumulation == 1
        # ddp that looks for unused parameters keeps its first buckets. Else it puts them in another
        # order after its first backward, and a sum of three ranks is rounded by its place in one.
        looks = keys.find_unused_parameters or config.training.deterministic
        with warnings.catch_warnings():
            # What torch 2.13 offers instead of broadcast_buffers, older ones do not have.
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
        self.summed_all = self.begun = False
        self.register_comm_hook(self, summed)

    def __call__(self, compute: Callable[[nn.Module], Any]) -> Any:
        if self.begun or not self.find_unused_parameters:
            return super().__call__(compute)
        self.begun = True
        # `auto` lets ddp look for unused parameters in any model; torch warns if there are none.
        with stderr_without(b"find_unused_parameters=True was specified"):
            return super().__call__(compute)

    @contextlib.contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Sum in the last micro-batch of a step; refuse one in which not all could be summed."""
        self.summed_all = False
        try:
            with contextlib.nullcontext() if last else self.no_sync():
                yield
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise UsageError(
                "ddp got a parameter's gradient twice in one backward: a checkpoint of activations"
                " with use_reentrant=True does that",
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), and of a model of"
                ' transformers: model.gradient_checkpointing_enable({"use_reentrant": False})',
            ) from error
        checked = last and not (self.find_unused_parameters or self.static_graph)
        if checked and not self.summed_all:
            # torch says so in the next forward only.
            named = self.module.model.named_parameters()
            without = [name for name, parameter in named if parameter.grad is None]
            example = f", such as {without[0]}" if without else ""
            raise UsageError(
                f"the step did not use all parameters of the model{example}", OTHER_PARTS
            )


def summed(copies, bucket):  # type: ignore[no-untyped-def]  # ddp compares annotations
    """Sum, where ddp by itself averages: every strategy scales the loss alike."""
    copies.summed_all = bucket.is_last()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    total: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return total


@contextlib.contextmanager
def stderr_without(text: bytes) -> Iterator[None]:
    """Hold back what this process writes to stderr, then write the lines that lack these words."""
    with tempfile.TemporaryFile() as held:
        kept = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            os.write(2, b"".join(line for line in held if text not in line))
