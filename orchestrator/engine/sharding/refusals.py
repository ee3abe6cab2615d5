"""Refuse models that cannot be trained by several ranks, or not in shards, before they are."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from orchestrator.common.errors import UsageError
from orchestrator.engine.ranks.plain_names import is_traceable_wrapper_subclass
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.sharding.blocks import has_sparse

OTHER_PARTS = (
    'a model that uses different parts of itself needs strategy="ddp" (fsdp.sharding_strategy) and'
    " find_unused_parameters=True (distributed.find_unused_parameters)"
)
WHOLE = 'strategy="ddp" (fsdp.sharding_strategy) keeps all parameters whole'
# Where torch keeps the hooks of a tensor: no public call lists them.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def refuse_untrainable(model: nn.Module, ranks: Ranks) -> None:
    """Refuse what no strategy can train on these ranks."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet: a lazy module learns it from the first batch",
                "call the model once before the optimizer and the Trainer are made:"
                " model(next(iter(loader))[0])",
            )
        if is_traceable_wrapper_subclass(tensor):
            raise UsageError(
                f"{name} is a {type(tensor).__name__}, which is made of other tensors",
                "train the plain weights, and quantise them afterwards",
            )
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
    """Refuse what several ranks can train, but not in shards."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{name or 'the model'} comes from torch.jit, which cannot be sharded",
                f"give the module that torch.jit was given; {WHOLE}",
            )
    if has_no_forward(model):
        raise UsageError(
            f"the model is a {type(model).__name__}, which has no forward, and cannot be sharded",
            f"give a module with a forward, or several by name: models=; {WHOLE}",
        )
    if has_sparse(model):
        raise UsageError(
            "the model has an embedding with sparse=True, whose gradients cannot be sharded",
            'use strategy="ddp" (fsdp.sharding_strategy), or sparse=False',
        )
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, hooks, None) for hooks in HOOKS):
            raise UsageError(
                f"a hook waits for the whole gradient of {name}, which no rank has under sharding",
                f"leave out register_hook() and register_post_accumulate_grad_hook(); {WHOLE}",
            )


def has_no_forward(module: nn.Module) -> bool:
    """Return True for a container that only holds other modules."""
    held = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return held and type(module).forward is nn.Module.forward
