"""Find the blocks of a model to shard one by one, and the parameters that cannot be sharded.

Repeated blocks are gathered one at a time; all other parameters stay with the root. FSDP refuses a
few small parameters (scalars, other dtypes than the rest of their block). Every rank keeps those
whole, and sum_whole() sums their gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from orchestrator.common.errors import UsageError, did_you_mean
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.ranks import Ranks


class Models(nn.ModuleDict):
    """Several models by name. Each is sharded by itself, and a step gets all of them."""


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the models inside a Models, which are sharded separately; none for a single model."""
    return list(model.children()) if isinstance(model, Models) else []


def blocks_of(model: nn.Module, wrap: Sequence[str]) -> list[nn.Module]:
    """Return the repeated blocks, or the modules of the classes in `wrap`, inner ones last.

    Repeated blocks are the members of every outermost ModuleList, and of a Sequential whose members
    are all of one class. A ModuleList in a ModuleList has no forward, so its members are used.
    """
    if not wrap:
        return list(dict.fromkeys(repeated_blocks(model)))
    names = {type(module).__name__ for module in model.modules()}
    for name in wrap:
        if name not in names:
            raise UsageError(
                f"fsdp.wrap names {name!r}, but the model has no module of that class"
                f"{did_you_mean(name, sorted(names))}"
            )
    return [module for module in model.modules() if type(module).__name__ in wrap]


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList):
        yield from block_members(module)
    elif is_stack(module):
        for member in module.children():
            # A member is a block, or a stage that holds blocks itself.
            inner = any(is_stack(part) for part in member.modules())
            yield from repeated_blocks(member) if inner else [member]
    else:
        for child in module.children():
            yield from repeated_blocks(child)


def block_members(container: nn.Module) -> Iterator[nn.Module]:
    for member in container.children():
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            yield from block_members(member)
        else:
            yield member


def is_stack(module: nn.Module) -> bool:
    """Return True for a Sequential of blocks of one class; single torch layers are not blocks."""
    if not isinstance(module, nn.Sequential) or len(module) < 2:
        return False
    first = module[0]
    of_torch = type(first).__module__.startswith("torch.nn")
    composite = any(True for _ in first.children()) or not of_torch
    return composite and len({type(member) for member in module}) == 1


def hidden_matrices(model: nn.Module, blocks: Sequence[nn.Module]) -> set[str]:
    """Return the names of the two-dimensional weights in the blocks, without embeddings."""
    inside = {id(p) for block in blocks for p in block.parameters() if p.dim() == 2}
    tables = (nn.Embedding, nn.EmbeddingBag)
    inside -= {id(m.weight) for m in model.modules() if isinstance(m, tables)}
    return {
        name for name, parameter in plain_names.named_parameters(model) if id(parameter) in inside
    }


def to_shard(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules to shard, inner ones first, the model last.

    A block that shares a parameter with a module outside it is not sharded by itself: the root,
    which stays gathered during the whole forward, holds its parameters.
    """
    users: Counter[nn.Parameter] = Counter()
    inside: dict[nn.Module, Counter[nn.Parameter]] = {}
    for module in model.modules():
        users.update(module.parameters(recurse=False))
    for block in blocks:
        inside[block] = Counter()
        for module in block.modules():
            inside[block].update(module.parameters(recurse=False))
    alone = [
        block
        for block in blocks
        if inside[block] and all(users[p] == many for p, many in inside[block].items())
    ]
    return [*reversed(alone), model]


def kept_whole(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that FSDP cannot shard. `modules` lists inner modules first."""
    seen: set[nn.Parameter] = set()
    whole: set[nn.Parameter] = set()
    for module in modules:
        parameters = [parameter for parameter in module.parameters() if parameter not in seen]
        seen.update(parameters)
        fit = [p for p in parameters if p.numel() and p.dim() and p.is_floating_point()]
        sizes: Counter[torch.dtype] = Counter()
        for parameter in fit:
            sizes[parameter.dtype] += parameter.numel() * parameter.requires_grad
        usual = sizes.most_common(1)[0][0] if sizes else None
        # All trained parameters of an FSDP group must have the same dtype.
        usual_ones = {p for p in fit if p.dtype == usual or not p.requires_grad}
        whole.update(parameter for parameter in parameters if parameter not in usual_ones)
    return whole


def has_sparse(model: nn.Module) -> bool:
    """Return True if an embedding gives sparse gradients."""
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def describe_blocks(model: nn.Module, whole: int) -> str:
    """Return a line about the blocks that are sharded one by one, and about unsharded parameters.

    `whole` is the number of parameters that each rank keeps whole.
    """
    counts = Counter(
        type(module).__name__.removeprefix("FSDP")
        for module in model.modules()
        if isinstance(module, FSDPModule) and module is not model
    )
    blocks = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    if not blocks:
        return "  no repeated blocks: the whole model is gathered at once (fsdp.wrap names classes)"
    rest = f"; {whole:,} parameters are whole on each rank" if whole else ""
    return f"  gathered one at a time: {blocks}{rest}"


def sum_whole(parameters: Sequence[nn.Parameter]) -> None:
    """Sum over all ranks the gradients of parameters that every rank keeps whole.

    A parameter that was used on only some ranks gets a gradient everywhere. Every rank calls it.
    """
    if not parameters:
        return
    device = parameters[0].device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32).to(device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if not anywhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        real = torch.view_as_real(grad) if grad.is_complex() else grad
        by_dtype.setdefault(real.dtype, []).append(real)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


OTHER_PARTS = (
    'a model that uses different parts of itself needs strategy="ddp" (fsdp.sharding_strategy) and'
    " find_unused_parameters=True (distributed.find_unused_parameters)"
)
WHOLE = 'strategy="ddp" (fsdp.sharding_strategy) keeps all parameters whole'


def refuse_untrainable(model: nn.Module, ranks: Ranks) -> None:
    """Refuse a model that no strategy can train on several ranks: embeddings with max_norm."""
    for name, module in model.named_modules():
        table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if table and module.max_norm is not None and ranks.world > 1:
            raise UsageError(
                f"{name or 'the model'} has max_norm, so each rank would shorten the rows that"
                " it looks up itself, and the ranks' weights would differ",
                "leave max_norm out, and shorten what was looked up, or all rows in a hook"
                " on_step_end=",
            )


def refuse_unshardable(model: nn.Module) -> None:
    """Refuse a model that only ddp can train on several ranks, because it cannot be sharded."""
    if has_sparse(model):
        raise UsageError(
            "the model has an embedding with sparse=True, whose gradients cannot be sharded",
            'use strategy="ddp" (fsdp.sharding_strategy), or sparse=False',
        )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise UsageError(
                f"a hook waits for the whole gradient of {name}, which no rank has under sharding",
                f"leave out register_hook(); {WHOLE}",
            )
