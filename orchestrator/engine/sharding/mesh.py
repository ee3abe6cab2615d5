"""Create the device mesh, and shard the model over it.

hybrid_shard shards inside a group of ranks and keeps one copy per group. As in PyTorch, this is a
mesh of two dimensions: dim 0 replicates and dim 1 shards. The group is a node, where links are
fast; only summed gradients travel between nodes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from orchestrator.common.errors import UsageError
from orchestrator.common.text import plural
from orchestrator.config.schema import COPIED, Config
from orchestrator.config.sharding import check_offload, group_size
from orchestrator.engine.ranks import agreement, plain_names
from orchestrator.engine.ranks.ranks import Ranks, device_name, set_group_timeouts
from orchestrator.engine.sharding.blocks import (
    blocks_of,
    kept_whole,
    parts_of,
    refuse_unshardable,
    refuse_untrainable,
    to_shard,
)
from orchestrator.engine.sharding.copies import Copies, mixed_precision

# FSDP treats a method of this name like a forward.
COMPUTED = "computed_by_orchestrator"
T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """The layout of the parameters over the ranks. `mesh` is None if nothing is sharded."""

    # The config's sharding strategy, or "single" for one process.
    strategy: str
    # The number of copies of all parameters over all ranks.
    copies: int
    mesh: DeviceMesh | None = None


# -- the mesh -------------------------------------------------------------------------------------


def make_mesh(config: Config, ranks: Ranks) -> Mesh:
    strategy = config.fsdp.sharding_strategy
    if ranks.world == 1:
        return Mesh("single", copies=1)
    if strategy in COPIED:
        return Mesh("ddp", copies=ranks.world)
    if config.distributed.find_unused_parameters:
        raise UsageError(
            f"find_unused_parameters is for ddp: under {strategy} all ranks use the same parts of"
            " the model",
            'strategy="ddp" (fsdp.sharding_strategy), or leave it out',
        )
    shape: tuple[int, ...] = (ranks.world,)
    if strategy == "hybrid_shard":
        size = group_size([node for node, _ in ranks.nodes], config.fsdp.shard_size)
        shape = (ranks.world // size, size)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    set_group_timeouts(config, *mesh.get_all_groups())
    return Mesh(strategy, ranks.world // shape[-1], mesh)


def describe_mesh(mesh: Mesh, ranks: Ranks) -> str:
    """Return a line about the strategy, and the copies and shards of the parameters."""
    if mesh.strategy == "single":
        return f"one process on {device_name(ranks.device)}: nothing is shared"
    if mesh.strategy == "ddp":
        return f"ddp: a whole copy of the parameters on each of {ranks.world} ranks"
    size = ranks.world // mesh.copies
    copies = "one copy" if mesh.copies == 1 else f"{mesh.copies} copies"
    each = "" if mesh.copies == 1 else "each "
    return f"{mesh.strategy}: {copies} of the parameters, {each}in {plural(size, 'shard')}"


# -- sharding the model ---------------------------------------------------------------------------


def spread_model(
    model: nn.Module,
    mesh: Mesh,
    ranks: Ranks,
    config: Config,
    fill: Callable[[], None] | None = None,
) -> nn.Module:
    """Return the model after activation checkpointing, compiling and sharding, block by block.

    A model may be on the meta device; `fill` allocates and fills it once it is sharded.
    """
    if mesh.mesh is None and not is_on_meta(model):
        # Sharding moves one group of parameters at a time, so a sharded model is not moved here.
        model.to(ranks.device)
    blocks = wrap_recomputed(
        model, blocks_of(model, config.fsdp.wrap), config.training.activation_checkpointing
    )
    if config.compile.enabled:
        for block in blocks or parts_of(model) or [model]:
            block.compile(
                backend=config.compile.backend,
                fullgraph=config.compile.fullgraph,
                dynamic=config.compile.dynamic,
                **({"mode": config.compile.mode} if config.compile.mode else {}),
            )
    if mesh.mesh is not None:
        shard_blocks(model, blocks, mesh, ranks, config)
    if fill is not None:
        fill()
    # ddp refuses a model without trained weights. If weights are unfrozen later, Steppers sums
    # their gradients.
    trains = any(parameter.requires_grad for parameter in model.parameters())
    return Copies(model, ranks, config) if mesh.strategy == "ddp" and trains else model


def distribute_model(
    model: nn.Module,
    strategy: str,
    ranks: Ranks,
    config: Config,
    fill: Callable[[], None] | None = None,
) -> tuple[Mesh, nn.Module]:
    """Distribute a model over the ranks, with rank 0's weights or those that `fill` gives it."""
    if any(isinstance(m, (FSDPModule, DistributedDataParallel)) for m in model.modules()):
        raise UsageError(
            "the model is spread over the ranks already",
            "give the plain model; after another Trainer, which has cut this one into shards, make"
            " it again: trainer.save(PATH) there, and Trainer(..., weights=PATH) here",
        )
    refuse_untrainable(model, ranks)
    if fill is None and is_on_meta(model):
        raise UsageError(
            "the model is on the meta device and has no weights",
            'name a file: weights="model.safetensors" (model.weights); or make it on the CPU',
        )
    if ranks.world > 1 and strategy in ("dp", "none"):
        raise UsageError(
            f"strategy={strategy!r} is for one process, and here are {ranks.world}: each would"
            " train a model of its own",
            'use "ddp", or "hybrid_shard" for a model that is too large for one device',
        )
    if strategy == "dp" and parts_of(model):
        raise UsageError('strategy="dp" is for one model, and here are several', 'use "ddp"')
    if fill is None:
        agreement.take_weights_of_first(model)
    else:
        agreement.refuse_other_shapes(agreement.named_tensors(model))
    if strategy == "dp":
        if not is_on_meta(model):
            model.to(ranks.device)
        if fill is not None:
            fill()
        return Mesh("single", copies=1), Replicated(model)
    mesh = make_mesh(config, ranks)
    return mesh, spread_model(model, mesh, ranks, config, fill)


def shard_blocks(
    model: nn.Module, blocks: list[nn.Module], mesh: Mesh, ranks: Ranks, config: Config
) -> None:
    fsdp = config.fsdp
    if ranks.device.type != "cuda":
        check_offload(config)
    reshard = fsdp.reshard_after_forward and mesh.strategy != "shard_grad_op"
    offload: OffloadPolicy = CPUOffloadPolicy() if fsdp.cpu_offload else OffloadPolicy()
    apart = parts_of(model)
    refuse_unshardable(model)
    modules = to_shard(model, [*apart, *blocks])
    whole = kept_whole(modules)
    make_shardable(model, whole, ranks.device)
    for module in modules:
        fully_shard(
            # torch 2.8 and 2.9 refuse a container that is not in a list.
            [module],
            mesh=mesh.mesh,
            # The root's backward follows right after its forward, so it stays gathered.
            reshard_after_forward=reshard and module is not model and module not in apart,
            mp_policy=mixed_precision(fsdp, module),
            offload_policy=offload,
            ignored_params=whole,
        )
    for rest in (model, *apart):
        # A step may use the root by a method that FSDP does not see, so backward_pass() frees it.
        cast(FSDPModule, rest).set_reshard_after_backward(False, recurse=False)
    parts = sharded_parts(model)
    for part in parts:
        # The loss is a sum over all tokens of all ranks, so gradients are summed, not averaged.
        # Gloo has no PREMUL_SUM, so this is a plain SUM.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # The first part is the model itself, which is gathered anyway.
    set_prefetching(parts[1:], config)


def make_shardable(model: nn.Module, whole: set[nn.Parameter], device: torch.device) -> None:
    """Convert all parameters to contiguous memory, and move unsharded ones to the device."""
    for parameter in model.parameters():
        # FSDP cuts rows, which channels_last or transposed parameters do not store together.
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    for parameter in whole:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def set_prefetching(ordered: list[FSDPModule], config: Config) -> None:
    """Set FSDP's prefetching: blocks are gathered while the blocks before them compute."""
    fsdp = config.fsdp
    for index, part in enumerate(ordered):
        ahead = ordered[index + 1 : index + 1 + fsdp.forward_prefetch]
        part.set_modules_to_forward_prefetch(ahead)
        # FSDP prefetches one block by default.
        if fsdp.backward_prefetch > 1:
            behind = ordered[max(0, index - fsdp.backward_prefetch) : index]
            part.set_modules_to_backward_prefetch(behind[::-1])


class Replicated(nn.DataParallel[nn.Module]):
    """DataParallel that passes unknown attributes and methods on to the model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


# Results of these operations are kept: recomputing them costs most for the memory they take.
COSTLY = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def wrap_recomputed(model: nn.Module, blocks: list[nn.Module], how: str) -> list[nn.Module]:
    """Wrap blocks in activation checkpointing, selective or full; return the wrapped blocks."""
    if how == "none":
        return blocks
    if not blocks:
        raise UsageError(
            f"training.activation_checkpointing is {how}, but the model has no repeated blocks:"
            " neither a ModuleList nor a Sequential of one class",
            "name the classes whose forward is to be computed again: fsdp.wrap",
        )
    kept = functools.partial(create_selective_checkpoint_contexts, list(COSTLY))
    more: dict[str, Any] = {"context_fn": kept} if how == "selective" else {}
    wrapped = {block: checkpoint_wrapper(block, **more) for block in blocks}
    # Inner blocks come first, and a block that is used twice is replaced under both names.
    for name, module in reversed(list(model.named_modules(remove_duplicate=False))):
        if module in wrapped:
            model.set_submodule(name, wrapped[module])
    return list(wrapped.values())


# -- forward and backward -------------------------------------------------------------------------


@contextlib.contextmanager
def backward_pass(model: nn.Module, mesh: Mesh, config: Config, *, last: bool) -> Iterator[None]:
    """Set up gradient synchronisation for a micro-batch's backward; only the last one sums all.

    Under hybrid_shard the sum across nodes happens once per step. fsdp.accumulate=whole also
    postpones the sum within the node, at the price of whole gradients in memory.
    """
    if isinstance(model, Copies):
        with model.backward(last=last):
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        if config.fsdp.accumulate == "whole":
            model.set_requires_gradient_sync(last)
        elif mesh.copies > 1 and not parts_of(model):
            # FSDP keeps one flat tensor per block for that; several losses would each need one.
            model.set_requires_all_reduce(last)
    yield
    for rest in (model, *parts_of(model)):
        if isinstance(rest, FSDPModule):
            rest.reshard()


def as_forward(model: nn.Module, compute: Callable[[nn.Module], T]) -> T:
    """Return compute(model), run as one forward of the distributed model.

    `compute` gets the model as the user wrote it. It may use other methods than forward,
    attributes, submodules and single weights. The hooks of ddp and FSDP run before and after all of
    it.
    """
    if isinstance(model, Copies):
        result: T = model(compute)
        return result
    if not isinstance(model, FSDPModule):
        return compute(model)
    call = functools.partial(compute, model)
    for part in (*parts_of(model)[::-1], model):
        if isinstance(part, FSDPModule):
            if not hasattr(part, COMPUTED):
                setattr(part, COMPUTED, lambda call: call())
                register_fsdp_forward_method(part, COMPUTED)
            call = functools.partial(getattr(part, COMPUTED), call)
    return call()


def sharded_parts(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard_model(model: nn.Module) -> None:
    """Free whole parameters that stay gathered after a forward without a backward."""
    for part in sharded_parts(model):
        part.reshard()


def whole_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Gather each block once; map the ids of its sharded parameters to the whole parameters.

    Backward fills the gradients of the whole parameters. Every rank calls it.
    """
    whole: dict[int, nn.Parameter] = {}
    for part in sharded_parts(model):
        module = cast(nn.Module, part)
        sharded = list(module.parameters())
        part.unshard()
        pairs = zip(sharded, module.parameters(), strict=True)
        whole |= {id(shard): own for shard, own in pairs if own is not shard}
        part.reshard()
    return whole


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode within the block, and restore each module's mode after it.

    Buffers are copied from rank 0 first. Every rank calls it.
    """
    agreement.take_buffers_of_first(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        reshard_model(model)
        for module, training in modes.items():
            module.training = training


def plain_class(model: nn.Module) -> type:
    """Return the class that the user wrote; FSDP replaces a model's class by a subclass."""
    classes = type(plain_names.inner_module(model)).__mro__
    return next(plain for plain in classes if not issubclass(plain, FSDPModule))


# -- a rank's shard of a tensor -------------------------------------------------------------------


def local_tensor(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def is_on_meta(model: nn.Module) -> bool:
    """Return True if any tensor of the model is on the meta device, without memory."""
    return any(tensor.is_meta for _, tensor in agreement.named_tensors(model))


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocate the model's memory on a device; parameters that are used twice stay shared.

    model.to_empty() would make two parameters of one that is used twice.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in replaced:
                replaced[weight] = nn.Parameter(
                    torch.empty_like(weight, device=device), requires_grad=weight.requires_grad
                )
            setattr(module, name, replaced[weight])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))


def local_part(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset of this rank's shard of a tensor in each dimension, and its shape."""
    start, local = [0] * tensor.dim(), local_tensor(tensor)
    cut = tensor.placements[-1] if isinstance(tensor, DTensor) else None
    if isinstance(tensor, DTensor) and isinstance(cut, Shard):
        mesh, rows = tensor.device_mesh, tensor.shape[cut.dim]
        # DTensor cuts rows like torch.chunk.
        each = -(-rows // mesh.size(mesh.ndim - 1))
        start[cut.dim] = min(rows, each * mesh.get_local_rank(mesh.ndim - 1))
    return tuple(start), tuple(local.shape)


def local_rows(weight: Tensor) -> tuple[Tensor, range]:
    """Return this rank's shard of a parameter, and the range of rows that it covers."""
    (first, *_), (rows, *_) = local_part(weight)
    return local_tensor(weight), range(first, first + rows)
