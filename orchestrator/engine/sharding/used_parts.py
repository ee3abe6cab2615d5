"""Find the whole parameters of a sharded model, and notice ranks that use other parts of it.

FSDP sums the gradients of a block as one flat tensor of those parameters that have one. Ranks that
use different parts of a block would add the gradient of one parameter to that of another. So each
rank notes which parameters got a gradient; a number for them is compared in every step.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from orchestrator.common.errors import UsageError
from orchestrator.engine.ranks import plain_names

APART = "the ranks, or the micro-batches of a step, used other parts of the model than each other"
FIX = (
    'a model that uses different parts of itself needs strategy="ddp" (fsdp.sharding_strategy) and'
    " find_unused_parameters=True (distributed.find_unused_parameters)"
)
OUTSIDE = (
    "under sharding a block's parameters are whole in its forward alone;"
    ' strategy="ddp" (fsdp.sharding_strategy) keeps all of them whole'
)


def blocks(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward has left gathered."""
    for block in blocks(model):
        block.reshard()


class UsedParts:
    """The parameters of a sharded model that got a gradient in the current step.

    With `alike`, all micro-batches of a step have to use the same ones: where the sum over copies
    waits for the last of them, FSDP adds up their flat tensors.
    """

    def __init__(self, model: nn.Module, *, alike: bool) -> None:
        self.model, self.alike = model, alike
        self.whole: dict[int, nn.Parameter] = {}  # by the id of the sharded parameter
        self.names: list[str] = []  # of those, in order
        self.used: set[int] = set()  # in this micro-batch, by position
        self.numbers: list[int] = []  # one for each micro-batch of this step

    def find(self) -> None:
        """Gather each block once, to know its whole parameters. Every rank calls it."""
        names = {id(parameter): name for name, parameter in plain_names.parameters(self.model)}
        for block in [] if self.whole else list(blocks(self.model)):
            sharded = list(cast(nn.Module, block).parameters())
            block.unshard()
            for shard, whole in zip(sharded, cast(nn.Module, block).parameters(), strict=True):
                if whole is not shard:
                    self._watch(names[id(shard)], shard, whole)
            block.reshard()

    def _watch(self, name: str, shard: Any, whole: Any) -> None:
        position = len(self.names)
        self.whole[id(shard)] = whole
        self.names.append(name)
        with trained(whole):
            whole.register_post_accumulate_grad_hook(lambda _: self.used.add(position))
        with trained(shard):
            shard.register_hook(functools.partial(refuse_apart, name))

    def close_micro_batch(self) -> None:
        self.numbers.append(zlib.crc32(repr(sorted(self.used)).encode()))
        self.used.clear()

    def close_step(self, rank: int) -> int:
        """Return a number for the parameters used in this step, small enough for exact sums.

        If micro-batches have to be alike and are not, it is one that no two ranks share.
        """
        for name, whole in zip(self.names, self.whole.values(), strict=True):
            if whole.grad is not None:
                raise UsageError(
                    f"a gradient of {name} came after FSDP had summed those of its block",
                    OUTSIDE,
                )
        numbers, self.numbers = self.numbers, []
        if self.alike and len(set(numbers)) > 1:
            return rank
        return zlib.crc32(repr(numbers).encode()) & 0x3FFF


@contextlib.contextmanager
def trained(parameter: nn.Parameter) -> Iterator[None]:
    """Let a parameter train for a moment: torch registers no hooks of a frozen one."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(before)


def refuse_apart(name: str, _gradient: Any) -> None:
    """Refuse a gradient that comes to a shard itself, as from full_tensor()."""
    raise UsageError(
        f"the step uses {name} outside the forward of its block, where it is in shards, and its"
        " gradient would not be summed over the ranks",
        OUTSIDE,
    )
