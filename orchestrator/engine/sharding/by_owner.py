"""Run an optimizer that needs whole tensors under sharding: each parameter has an owner.

In a step the owner gets the whole weight and gradient, calls the optimizer on them, and gives the
weight back in shards. State stays with the owner; it is put into shards to be saved.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.utils import _pytree as tree

from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.sharding.exchange import Exchange, dealt, exchange_of, is_cut

CLOSE = 2e-4  # of the largest change: shards and whole tensors come to the same
GIVEN = ("state", "param_groups")
SMALL, STEPS = 8, 3  # rows and columns, and steps, of a trial


class Owners:
    """The parameters of one optimizer, who owns each of them, and what stands for it there."""

    def __init__(self, optimizer: Optimizer, sharded: Sequence[nn.Parameter]) -> None:
        self.optimizer, self.sharded = optimizer, list(sharded)
        first: Any = self.sharded[0]
        self.mesh: DeviceMesh = first.device_mesh
        self.group = self.mesh.get_group(self.mesh.ndim - 1)
        self.rank = dist.get_rank(self.group)
        loads = [0.0] * dist.get_world_size(self.group)
        chosen = dealt([float(parameter.numel()) for parameter in self.sharded], loads)
        self.owner = dict(zip(map(id, self.sharded), chosen, strict=True))
        self.stand_ins = {parameter: nn.Parameter(hollow(parameter)) for parameter in self.sharded}
        self.groups: list[list[Any]] | None = None  # while the stand-ins are in their place
        self.sent: list[tuple[list[nn.Parameter], Exchange]] = []

    # -- a step -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Have step() see whole tensors, and hooks of the user's what they see without this."""
        optimizer = self.optimizer
        first = optimizer.register_step_pre_hook(self._take)
        last = optimizer.register_step_post_hook(self._give)
        after: Any = optimizer._optimizer_step_post_hooks
        after.move_to_end(last.id, last=False)
        try:
            yield
        finally:
            first.remove()
            last.remove()
            self._put_back()

    @torch.no_grad()
    def _take(self, *_: Any) -> None:
        self.sent, waiting = [], []
        for some in by_dtype([p for p in self.sharded if p.grad is not None]):
            exchange = exchange_of(some, [self.owner[id(p)] for p in some])
            self.sent.append((some, exchange))
            waiting.append([exchange.to_owners(list(map(local, values)))
                            for values in (some, [p.grad for p in some])])  # fmt: skip
        for (some, _exchange), (weights, gradients) in zip(self.sent, waiting, strict=True):
            whole = weights()
            for place, gradient in gradients().items():
                stand_in = self.stand_ins[some[place]]
                device = local(some[place]).device
                stand_in.data, stand_in.grad = whole[place].to(device), gradient.to(device)
        groups = self.optimizer.param_groups
        self.groups = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [self.stand_ins.get(p, p) for p in group["params"]]
        for parameter, stand_in in self.stand_ins.items():
            if parameter in self.optimizer.state:
                self.optimizer.state[stand_in] = self.optimizer.state.pop(parameter)

    def _put_back(self) -> None:
        if self.groups is None:
            return
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = parameters
        self.groups = None
        for parameter, stand_in in self.stand_ins.items():
            state = self.optimizer.state.pop(stand_in, None)
            if state and self.owner[id(parameter)] == self.rank:
                self.optimizer.state[parameter] = state
            stand_in.data, stand_in.grad = hollow(parameter), None

    @torch.no_grad()
    def _give(self, *_: Any) -> None:
        for some, exchange in self.sent:
            whole = {place: self.stand_ins[some[place]].data for place in exchange.mine}
            for parameter, part in zip(some, exchange.to_shards(whole, some[0].dtype)(),
                                       strict=True):  # fmt: skip
                local(parameter).copy_(part)
        self._put_back()

    # -- what is saved ------------------------------------------------------------------------

    def in_shards(
        self, whole: Mapping[str, Tensor], forms: Mapping[str, tuple[torch.dtype, list[int], int]]
    ) -> dict[str, Tensor]:
        """Put tensors of their owners into shards; all ranks know dtype, shape and owner of each,
        in the same order."""
        found: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(form[0] for form in forms.values()):
            paths = [path for path, form in forms.items() if form[0] == dtype]
            shapes = [torch.Size(forms[path][1]) for path in paths]
            exchange = Exchange(self.mesh, shapes, [0] * len(paths), [forms[p][2] for p in paths])
            mine = {place: whole[paths[place]] for place in exchange.mine}
            parts = exchange.to_shards(mine, dtype)()
            for path, part, shape in zip(paths, parts, shapes, strict=True):
                found[path] = self._sharded(part, shape)
        return found

    def _sharded(self, part: Tensor, shape: torch.Size) -> Tensor:
        places: list[Placement] = [Replicate()] * self.mesh.ndim
        places[-1] = Shard(0)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part.contiguous(), self.mesh, places, run_check=False, shape=shape, stride=stride
        )

    def whole(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
        """Give the owners what is in shards; what is whole on each rank stays as it is."""
        found = {p: tensors[p] for p in owners if not is_cut(tensors[p])}
        cut: dict[str, Any] = {p: tensors[p] for p in owners if is_cut(tensors[p])}
        for dtype in dict.fromkeys(tensor.dtype for tensor in cut.values()):
            paths = [path for path, tensor in cut.items() if tensor.dtype == dtype]
            exchange = exchange_of([cut[p] for p in paths], [owners[p] for p in paths])
            came = exchange.to_owners([local(cut[p]) for p in paths])()
            found |= {paths[place]: tensor for place, tensor in came.items()}
        return found


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()


def hollow(parameter: Tensor) -> Tensor:
    """Make something of its shape that takes no memory."""
    zero = torch.zeros((), dtype=parameter.dtype, device=local(parameter).device)
    return zero.expand(parameter.shape)


def by_dtype(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    kinds = dict.fromkeys((p.dtype, p.grad.dtype) for p in parameters)
    for kind in kinds:
        yield [p for p in parameters if (p.dtype, p.grad.dtype) == kind]


# -- who needs it ----------------------------------------------------------------------------------


def owners_of(optimizer: Optimizer, on_shards: Callable[[], Any]) -> Owners | None:
    """Give a parameter an owner each, if a trial on small tensors says that this alone is right."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = [parameter for parameter in every if is_cut(parameter)]
    others = {key: value for key, value in vars(optimizer).items() if key not in GIVEN}
    if not sharded or any(
        isinstance(v, (Optimizer, nn.Parameter)) for v in tree.tree_leaves(others)
    ):
        return None  # what it holds besides its groups would not be whole
    mesh = sharded[0].device_mesh
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
        warnings.simplefilter("ignore")
        try:
            needed = needs_owners(optimizer, mesh, on_shards)
        except Exception:  # noqa: BLE001 (code of libraries; its first step says what it cannot do)
            needed = False
    return Owners(optimizer, sharded) if all(gather(needed)) else None


def needs_owners(optimizer: Optimizer, mesh: DeviceMesh, on_shards: Callable[[], Any]) -> bool:
    expected, _ = trial(optimizer, mesh)
    places: list[Placement] = [Replicate()] * (mesh.ndim - 1)

    def cut(value: Tensor) -> Tensor:
        if not value.dim():
            return value
        return distribute_tensor(value, mesh, [*places, Shard(0)], src_data_rank=None)

    try:
        with on_shards():
            found, _ = trial(optimizer, mesh, cut)
    except Exception:  # noqa: BLE001 (code of libraries)
        found = None
    if found is not None and all(map(close, found, expected)):
        return False
    for place in range(len(expected)):
        for late in (None, place):  # a count of steps may begin with the first gradient of a group
            beside, alone = (trial(optimizer, mesh, only=o, late=late) for o in (None, place))
            if not alone[0][place][1].equal(beside[0][place][1]):
                return False
            if alone[1] != beside[1]:  # what all parameters share may show in weights later on
                return False
    return True


def close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Compare what two trials have come to, by how far they have gone."""
    (first, one), (_, other) = found, expected
    rounding = 1e-6 * float(other.abs().max())
    allowed = CLOSE * float((other - first).abs().max()) + rounding
    return bool((one - other).abs().max() <= allowed)


def trial(
    optimizer: Optimizer,
    mesh: DeviceMesh,
    spread: Callable[[Tensor], Tensor] = lambda value: value,
    only: int | None = None,
    late: int | None = None,  # has no gradient in the first step
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, float]]:
    """Let a copy of an optimizer take some steps on small tensors, of which one alone, or all, have
    gradients; give what they were and what becomes of them, and the numbers that they share."""
    torch.manual_seed(0)
    small = small_of(optimizer, mesh)
    drawn = {
        shape: [torch.randn(shape).to(mesh.device_type) for _ in range(STEPS + 1)]
        for shape in dict.fromkeys(small.values())
    }
    made = {key: nn.Parameter(spread(drawn[shape][0].clone())) for key, shape in small.items()}
    own = copied(optimizer, made)
    getattr(own, "train", lambda: None)()
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        for place, (key, shape) in enumerate(small.items()):
            given = only in (None, place) and (late != place or step > 1)
            made[key].grad = spread(drawn[shape][step].clone()) if given else None
        own.step()
    values: list[Any] = [parameter.detach() for parameter in made.values()]
    ended = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
    pairs = [(drawn[shape][0], end) for shape, end in zip(small.values(), ended, strict=True)]
    return pairs, shared_by_all(own)


def shared_by_all(optimizer: Optimizer) -> dict[str, float]:
    """Return the numbers that an optimizer keeps for a group, or for all of its parameters."""
    own = {key: value for key, value in vars(optimizer).items() if key not in GIVEN}
    state = {str(key): v for key, v in optimizer.state.items() if not isinstance(key, Tensor)}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    found = {}
    for path, value in tree.tree_flatten_with_path([own, state, groups])[0]:
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)  # noqa: PLW2901  a number as a tensor is a number
        if isinstance(value, (int, float)):
            found[tree.keystr(path)] = float(value)
    return found


def small_of(optimizer: Optimizer, mesh: DeviceMesh) -> dict[tuple[int, int], tuple[int, ...]]:
    """Choose a small shape for one parameter of each number of dimensions in each group; all ranks
    have as much of it."""
    size = mesh.size(mesh.ndim - 1)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            shape = [min(SMALL, many) for many in parameter.shape]
            if shape:
                shape[0] = -(-shape[0] // size) * size
            found.setdefault((number, parameter.dim()), tuple(shape))
    return found


def copied(optimizer: Optimizer, made: Mapping[tuple[int, int], nn.Parameter]) -> Optimizer:
    """Copy an optimizer as it was made, without hooks, for these parameters."""
    memo: dict[int, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        memo |= {id(p): made[number, p.dim()] for p in group["params"]}
    own = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in (*GIVEN, "step") and "hooks" not in key:
            vars(own)[key] = copy.deepcopy(value, memo)
    own.param_groups = [
        {
            **{k: copy.deepcopy(v, memo) for k, v in group.items() if k != "params"},
            "params": [parameter for key, parameter in made.items() if key[0] == number],
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    own.state = defaultdict(dict)
    own.__setstate__({})
    return own
