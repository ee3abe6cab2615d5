"""Bring along what a user's model does beside computing, which sharding would lose.

Hooks of parameters are kept; what cannot be kept is refused.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import register_pytree_node, tree_leaves

from orchestrator.common.errors import UsageError
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.ranks import Ranks

Hook = Callable[[Tensor], Any]  # of a gradient
WHOLE = 'strategy="ddp" (fsdp.sharding_strategy) keeps all parameters whole'
GATHERED = (
    "parameters of a block that are used outside its forward need find_unused_parameters=True"
    f" (distributed.find_unused_parameters), which gathers all blocks for a whole step; {WHOLE}"
)
FIRST_FORWARDS, EVERY = 3, 64  # which forwards are looked at for changes


# -- before a model is spread ---------------------------------------------------------------------


def refuse_untrainable(model: nn.Module, ranks: Ranks) -> None:
    """Refuse what no strategy can train on these ranks."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet: a lazy module learns it from the first batch",
                "call the model once before the optimizer and the Trainer are made:"
                " model(next(iter(loader))[0])",
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
    """Refuse what can be trained by several ranks, but not in shards."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{name or 'the model'} comes from torch.jit, which cannot be sharded",
                f"give the module that torch.jit was given; {WHOLE}",
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"a hook waits for the whole gradient of {name}"
                " (register_post_accumulate_grad_hook), which no rank has under sharding",
                f"leave the step to the Trainer's optimizer; {WHOLE}",
            )


# -- hooks of parameters --------------------------------------------------------------------------


Hooks = dict[int, Hook]  # of one parameter, as torch keeps them: who removes one does it there


def hooks_of(model: nn.Module) -> dict[tuple[int, str], Hooks]:
    """Find what is to be called with the gradients of parameters, which sharding replaces."""
    return {
        (id(module), name): parameter._backward_hooks
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter._backward_hooks is not None
    }


def keep_hooks(groups: Iterator[Any], found: dict[tuple[int, str], Hooks]) -> None:
    """Have them called with the gradients of whole parameters, and what is added later, too."""
    for group in groups:
        hooked = []
        for parameter in group.fsdp_params:
            info = parameter._module_info
            hooks = found.get((id(info.module), info.param_name), OrderedDict())
            parameter.sharded_param._backward_hooks = hooks
            hooked.append((parameter, hooks))
        gathered = functools.partial(gathered_with_hooks, group.wait_for_unshard, hooked)
        group.wait_for_unshard = gathered


def gathered_with_hooks(wait: Callable[[], None], hooked: list[tuple[Any, Hooks]]) -> None:
    wait()
    for parameter, hooks in hooked:
        whole = getattr(parameter, "_unsharded_param", None) if hooks else None
        if whole is not None and whole.requires_grad and not whole._backward_hooks:
            whole.register_hook(functools.partial(call_all, hooks))


def call_all(hooks: Hooks, gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


# -- what a forward gives, and what it changes ----------------------------------------------------


def refuse_hidden(block: str, output: Any) -> None:
    """Refuse an output whose tensors torch does not find: the block would not be gathered again
    for its backward, which would read freed memory."""
    if not torch.is_grad_enabled():
        return
    leaves = leaves_shown(output)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return
    for leaf in leaves:
        inside = [] if isinstance(leaf, Tensor) else tree_leaves(list(attributes(leaf)))
        if any(isinstance(value, Tensor) and value.requires_grad for value in inside):
            raise UsageError(
                f"{block} gives a {type(leaf).__name__}, in which torch does not see the tensors,"
                " as it has to under sharding",
                f"give a tensor, or a tuple, list, dict, NamedTuple or dataclass of them; {WHOLE}",
            )


def leaves_shown(output: Any) -> list[Any]:
    """Give what torch finds in an output, once it has been told of the dataclasses there."""
    leaves = tree_leaves(output)
    hidden = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    if not hidden:
        return leaves
    for kind in hidden:
        names = [field.name for field in fields(kind)]
        register_pytree_node(kind, functools.partial(apart, names), together)
    return leaves_shown(output)


def apart(names: list[str], value: Any) -> tuple[list[Any], Any]:
    there = [name for name in names if hasattr(value, name)]
    return [getattr(value, name) for name in there], (copy.copy(value), there)


def together(values: Iterable[Any], context: Any) -> Any:
    like, names = context
    again = copy.copy(like)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(again, name, value)  # also of a frozen one
    return again


def attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for name in getattr(type(value), "__slots__", ()):
        yield getattr(value, name, None)


# -- parameters of a block that are used outside its forward --------------------------------------


def refuse_sharded(result: Any) -> None:
    """Refuse a loss, or another result, that was computed from shards."""
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(result)):
        raise UsageError(
            "the step uses parameters of a block outside its forward, where they are in shards",
            GATHERED,
        )


def refuse_replaced(group: Any, model: nn.Module) -> None:
    """Refuse what stands in the place of a parameter, as torch.func.functional_call() puts it
    there: FSDP would put its own over it."""
    for parameter in group.fsdp_params:
        info = parameter._module_info
        there = info.module._parameters.get(info.param_name)
        if there is None or there is parameter.sharded_param:
            continue
        if there is not getattr(parameter, "_unsharded_param", None):
            named = plain_names.parameters(model)
            name = next((n for n, p in named if p is there), info.param_name)
            raise UsageError(
                f"{name} was replaced, as torch.func.functional_call() does, and sharding would"
                " compute with the parameter itself",
                GATHERED,
            )


def watched_shards(groups: Iterator[Any], model: nn.Module) -> list[Any]:
    """Have a gradient refused that comes to the shards themselves, as from full_tensor(): nobody
    would sum it over the ranks. It is watched for as long as the result is held."""
    names = {id(parameter): name for name, parameter in plain_names.parameters(model)}
    nodes = []
    for group in groups:
        for shard in (parameter.sharded_param for parameter in group.fsdp_params):
            if shard.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(shard).node
                name = names.get(id(shard), "a parameter")
                node.register_prehook(functools.partial(refuse_apart, name))
                nodes.append(node)
    return nodes


def refuse_apart(name: str, _gradients: Any) -> None:
    raise UsageError(
        f"the step uses {name} outside the forward of its block, where it is in shards, and its"
        " gradient would not be summed over the ranks",
        GATHERED,
    )


def refuse_freed(error: RuntimeError) -> None:
    """Say what it means that a backward finds a parameter freed."""
    if "storage of size 0" in str(error):
        raise UsageError(
            "the backward needs parameters of a block that it has freed: what the block computed"
            " comes to the loss by something else than its output, such as a cache",
            GATHERED,
        ) from error


def refuse_copy(model: nn.Module, _memo: Any = None) -> nn.Module:
    """Take the place of FSDP's __deepcopy__, which raises an AssertionError."""
    raise UsageError(
        "a model in shards cannot be copied by copy.deepcopy()",
        'copy it before the Trainer is made, and give both: models={"net": ..., "copy": ...}; a'
        " hook may load the state of one into the other; ema=0.999 keeps an average of the weights;"
        f" {WHOLE}",
    )


class Changes:
    """Notices parameters that a forward changes in place: in shards, that would be lost."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.forwards = 0
        self.versions: dict[int, int] = {}  # of whole parameters, by id

    def refuse(self, groups: Iterator[Any]) -> None:
        """Look after a forward, if it is one of those that are looked at."""
        self.forwards += 1
        if self.forwards > FIRST_FORWARDS and self.forwards % EVERY:
            return
        for group in groups:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    self._compare(parameter, whole._version)

    def _compare(self, parameter: Any, version: int) -> None:
        if self.versions.setdefault(id(parameter), version) == version:
            return
        same = (parameter.sharded_param, parameter._unsharded_param)
        named = plain_names.parameters(self.model)
        name = next(name for name, value in named if any(value is one for one in same))
        raise UsageError(
            f"{name} was changed in the forward, which would be lost under sharding",
            f"change it in a hook on_step_end=, with torch.no_grad(); {WHOLE}",
        )
