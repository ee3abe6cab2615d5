"""Train models that use parts of themselves: LayerDrop, stochastic depth, experts, several heads.

FSDP sums the gradients of a block as one flat tensor of those parameters that have one, and ddp
waits for all of them. So ranks that use other parts than each other would add the gradient of one
parameter to another, or wait for ever. By default all ranks have to use the same parts, which is
checked in every step: one that did not is not taken. With find_unused_parameters they may differ:
all blocks are gathered before a forward, and summed after the last backward of a step, in an order
that does not depend on what was used.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from orchestrator.common.errors import UsageError
from orchestrator.engine.ranks.ranks import all_here_by_store, host_group
from orchestrator.engine.sharding import block_order
from orchestrator.engine.sharding.block_order import BlockOrder
from orchestrator.engine.sharding.blocks import has_sparse
from orchestrator.engine.sharding.own_code import (
    Changes,
    refuse_freed,
    refuse_hidden,
    refuse_replaced,
    refuse_sharded,
    watched_shards,
)
from orchestrator.engine.sharding.several import parts_of

T = TypeVar("T")
FIX = (
    "a model of which some ranks use other parts, or which they call more often, needs"
    " find_unused_parameters=True of the Trainer, or distributed.find_unused_parameters of a config"
)


# -- sharded --------------------------------------------------------------------------------------


class UsedParts:
    """The parameters that this rank used since the last step, of a sharded model.

    `copies` lists the ranks that share each copy; `before_sum` is called with each block.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fills: bool,
        differ: bool,
        copies: Sequence[Sequence[int]],
        before_sum: Callable[[Any], None],
    ) -> None:
        vars(model)["_used_parts"] = self
        self.model, self.fills, self.differ = model, fills, differ
        self.rests = {model, *parts_of(model)}  # their groups have what is in no block
        self.order = BlockOrder(copies)
        self.before_sum = before_sum
        self.parameters: set[int] = set()  # by id: those that got a gradient
        self.changes = Changes(model)
        self.shards: list[Any] = []  # whose gradients come from FSDP alone
        self.in_forward = False
        self.derived = False  # in the forward: its parameters are read again by the backward
        for group in groups(model):
            group.post_backward = functools.partial(self._sum, group, group.post_backward)
            group.unshard = functools.partial(self._gather, group, group.unshard)
            group.reshard = functools.partial(self._free, group.reshard)
            group.post_forward = functools.partial(self._note_forward, group, group.post_forward)
            if any(part in self.rests for part in group.modules):
                register = group._register_post_backward_hook
                group._register_post_backward_hook = functools.partial(self._sums_at, register)

    def _gather(
        self, group: Any, unshard: Callable[..., None], *options: Any, **named: Any
    ) -> None:
        """Note that a block is gathered, unless it is there already."""
        if group._all_gather_result is None and not group.is_unsharded:
            refuse_replaced(group, self.model)
            self.order.gathers(name_of(group))
        unshard(*options, **named)

    def _note_forward(
        self, group: Any, post_forward: Callable[..., Any], module: Any, inputs: Any, output: Any
    ) -> Any:
        refuse_hidden(name_of(group), output)
        if torch.is_grad_enabled():  # in an evaluation each copy may compute what it likes
            self.order.computed(name_of(group))
        return post_forward(module, inputs, output)

    def _sums_at(self, register: Callable[..., Any], args: Any, named: Any) -> Any:
        """Sum and free a part that is in no block at the end of the backward, not where the input
        of a forward was: a step may use it again, by a method that FSDP does not see."""
        return (args, named) if self.in_forward else register(args, named)

    def _free(self, reshard: Callable[[], None]) -> None:
        if not self.derived:
            reshard()

    def _sum(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Note who has a gradient, and give zeros to who has none where the layout must not change:
        between copies, FSDP adds up the flat tensors of all micro-batches."""
        if self.in_forward:  # a derivative that the loss is made of, and not the gradient of it
            self.derived = True
            return
        if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
            return  # the block was never gathered
        if group.reduce_grads:
            idle = []
            for index, parameter in enumerate(group.fsdp_params):
                whole = parameter._unsharded_param
                if not whole.requires_grad:
                    continue
                if whole.grad is not None or parameter.unsharded_accumulated_grad is not None:
                    self.parameters.add(id(parameter.sharded_param))
                    continue
                idle.append(index)
                if self.fills:
                    whole.grad = torch.zeros_like(whole)
            self.order.summed(name_of(group), idle)
            self.before_sum(group)
        post_backward(*unused)

    def close_step(self) -> int:
        """Leave parameters without a gradient that no rank used: an optimizer must not decay them.

        Gives a number that stands for what was used, unless ranks may differ in it.
        """
        number = self.order.end_step()
        sharded = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        used = torch.tensor([id(parameter) in self.parameters for parameter in sharded]).int()
        if self.differ:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=host_group())
        for parameter, kept in zip(sharded, used.tolist(), strict=True):
            if not kept:
                parameter.grad = None
        self.parameters.clear()
        return 0 if self.differ else number


def of(model: nn.Module) -> UsedParts | None:
    return vars(model).get("_used_parts")


def blocks(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def state_of(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def groups(model: nn.Module) -> Iterator[Any]:
    """Give FSDP's groups of parameters, of all blocks."""
    for state in map(state_of, blocks(model)):
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        # Before torch 2.12 there is one, or none where a block has no parameters of its own.
        elif state._fsdp_param_group is not None:
            yield state._fsdp_param_group


def name_of(group: Any) -> str:
    return group._module_fqn or "the rest of the model"


def watched(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Name ranks that wait for each other because they use other numbers of blocks."""
    used = of(model)
    return block_order.watched(None if used is None or used.differ else used.order, FIX)


def all_at_end(model: nn.Module) -> None:
    """Wait for the ranks after forwards that no step follows: who is still in one waits for others
    to gather a block, and would meet them in the next collective."""
    if (used := of(model)) is not None:
        used.order.end_forward()
        all_here_by_store()


def computed(model: nn.Module, call: Callable[[], T]) -> T:
    """Call it, with all blocks gathered in one order where ranks may use other ones."""
    used = of(model)
    if used is None:
        return call()
    if used.differ:
        for block in blocks(model):
            block.unshard()
    used.shards = used.shards or watched_shards(groups(model), model)
    used.in_forward = True
    try:
        result = call()
    finally:
        used.in_forward = False
    refuse_sharded(result)
    used.changes.refuse(groups(model))
    used.order.end_forward()
    return result


def shards_again(model: nn.Module) -> None:
    """Free whole parameters after a forward without a backward, or with a derivative in it."""
    used = of(model)
    if used is not None:
        used.derived = False
    for block in blocks(model):
        block.reshard()


@contextlib.contextmanager
def freed(model: nn.Module) -> Iterator[None]:
    """Free at the end of a backward what a derivative within its forward has kept whole."""
    try:
        yield
    except RuntimeError as error:
        refuse_freed(error)
        raise
    used = of(model)
    if used is not None and used.derived:
        shards_again(model)


# -- several losses -------------------------------------------------------------------------------


def whole_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Give those of the parameters that are trained, as a backward finds them: gathered, where they
    are in shards. What no forward has gathered has no gradient."""
    found = {}
    for group in groups(model):
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            found[id(parameter.sharded_param)] = whole
    wholes = [found.get(id(p), p) for p in parameters if p.requires_grad]
    return [whole for whole in wholes if whole is not None]


@contextlib.contextmanager
def of_one_loss(model: nn.Module, trained: set[int], *, last: bool) -> Iterator[None]:
    """Sum in this backward what one of several losses trains, by id, and nothing else.

    Parts that belong to no block stay gathered until the last of the losses.
    """
    used = of(model)
    if used is None or used.differ:  # these sum by themselves, once all losses are done
        yield
        return
    blocks_here = list(groups(model))
    before = [group.reduce_grads for group in blocks_here]
    context: Any = state_of(cast(FSDPModule, model))._state_ctx
    is_last = context.is_last_backward
    for group in blocks_here:
        mine = any(id(parameter.sharded_param) in trained for parameter in group.fsdp_params)
        group.reduce_grads = group.reduce_grads and mine
    context.is_last_backward = is_last and last
    rests = [part for part in (model, *parts_of(model)) if isinstance(part, FSDPModule)]
    for rest in rests:
        rest.set_reshard_after_backward(last, recurse=False)
    try:
        yield
    finally:
        context.is_last_backward = is_last
        for group, reduces in zip(blocks_here, before, strict=True):
            group.reduce_grads = reduces
        for rest in rests:
            rest.set_reshard_after_backward(True, recurse=False)


@contextlib.contextmanager
def summed_in_order(model: FSDPModule, *, last: bool) -> Iterator[None]:
    """Keep whole gradients until the step is complete, and sum them block by block."""
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(not last)
    with freed(cast(nn.Module, model)):
        yield
        if last:
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)
            model.set_reshard_after_backward(True)
            state_of(model)._root_post_backward_final_callback()


# -- ddp ------------------------------------------------------------------------------------------


class SummedBuckets:
    """Sum the gradients of ddp, bucket by bucket, and know whether it has summed all."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.checked = not (model.find_unused_parameters or model.static_graph)
        self.complete = False
        # The buckets are as in all later steps: a sum of two is that in any order.
        exact = dist.get_world_size() == 2 or has_sparse(model)
        self.ordered = model.find_unused_parameters or exact

    def sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sum, where ddp by itself averages: every strategy scales the loss alike."""
        self.complete = bucket.is_last()
        if not self.ordered:
            as_it_is: torch.futures.Future[Tensor] = torch.futures.Future()
            as_it_is.set_result(bucket.buffer())
            return as_it_is
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return summed

    def order(self, model: DistributedDataParallel) -> None:
        """Sum the first step's gradients as those of all others.

        ddp puts its buckets in order after its first backward. Of more than two ranks, a sum is
        rounded as it lies in a bucket, so a training that goes on would differ from one that was
        never stopped.
        """
        self.ordered = True
        model.reducer._rebuild_buckets()
        for bucket in model.reducer._get_zeros_like_grad_buckets():
            pairs = [
                (laid_as(parameter, place), parameter.grad)
                for parameter, place in zip(bucket.parameters(), bucket.gradients(), strict=True)
                if parameter.grad is not None
            ]
            for place, grad in pairs:
                place.copy_(grad)
            dist.all_reduce(bucket.buffer())
            for place, grad in pairs:
                grad.copy_(place)


SummedBuckets.sum.__annotations__ = {}  # ddp compares them with types, and these are strings


def laid_as(parameter: Tensor, place: Tensor) -> Tensor:
    """View a place in a bucket with the strides that ddp gives it: those of a dense parameter."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return place.as_strided(parameter.shape, parameter.stride()) if dense else place


def sum_buckets(model: DistributedDataParallel) -> None:
    """Let ddp sum. A step that does not use all parameters is refused, unless the model may."""
    buckets = SummedBuckets(model)
    model.register_comm_hook(buckets, SummedBuckets.sum)
    vars(model)[BUCKETS] = buckets


class FirstLook:
    """Stands for ddp's reducer until its first search for unused parameters.

    torch warns there that it found none, in C++, past Python's filters. But a model that uses all
    of itself is what everybody hopes for, and `auto` lets ddp search in any.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model, self.reducer = model, model.reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        self.model.reducer = self.reducer
        with stderr_without(b"find_unused_parameters=True was specified"):
            self.reducer.prepare_for_backward(outputs)


def inspect_quietly(model: DistributedDataParallel) -> None:
    model.reducer = FirstLook(model)  # type: ignore[assignment]


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


@contextlib.contextmanager
def summed_by_ddp(model: DistributedDataParallel, *, last: bool) -> Iterator[None]:
    """Sum in the last micro-batch of a step, and say what helps where torch finds that a gradient
    came twice."""
    first = model.static_graph and GRAPH_KNOWN not in vars(model)  # ddp wants to sum in it
    try:
        with summed_buckets(model) if last or first else model.no_sync():
            yield
    except RuntimeError as error:
        if "mark a variable ready only once" not in str(error):
            raise
        raise UsageError(
            "ddp got a parameter's gradient twice in one backward: a checkpoint of activations with"
            " use_reentrant=True does that",
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), and of a model of"
            ' transformers: model.gradient_checkpointing_enable({"use_reentrant": False})',
        ) from error
    if first:
        vars(model)[GRAPH_KNOWN] = [] if last else taken_away(model)
    elif last and vars(model).get(GRAPH_KNOWN):
        for parameter, summed in vars(model)[GRAPH_KNOWN]:
            parameter.grad = summed if parameter.grad is None else parameter.grad.add_(summed)
        vars(model)[GRAPH_KNOWN] = []


BUCKETS = "_summed_buckets"
# In a model of ddp whose graph has been seen: gradients that are summed already in this step.
GRAPH_KNOWN = "_summed_at_first"


def taken_away(model: DistributedDataParallel) -> list[tuple[nn.Parameter, Tensor]]:
    """Take the gradients out of the model, or ddp would sum them once more."""
    summed = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    for parameter, _ in summed:
        parameter.grad = None
    return summed


@contextlib.contextmanager
def summed_buckets(model: DistributedDataParallel) -> Iterator[None]:
    """Refuse a step whose gradients ddp has not summed; torch says so in the next forward only."""
    buckets: SummedBuckets = vars(model)[BUCKETS]
    buckets.complete = False
    yield
    if buckets.checked and not buckets.complete:
        without = [name for name, p in model.module.named_parameters() if p.grad is None]
        example = f", such as {without[0]}" if without else ""
        raise UsageError(f"the step did not use all parameters of the model{example}", FIX)
    if not buckets.ordered:
        buckets.order(model)
