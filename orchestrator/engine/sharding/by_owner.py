"""Run an optimizer that needs whole tensors under sharding: each parameter has an owner.

In a step the owner gets whole weights and gradients, calls the optimizer on them, and gives the
weights back in shards: a message's worth at a time, so that few are whole at once. State stays with
the owner; it is put into shards to be saved.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.common.errors import UsageError
from orchestrator.engine.ranks.randomness import randomness_kept, seed_all
from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.sharding.exchange import Exchange, dealt, exchange_of, is_cut, messages

Key = TypeVar("Key")
Between = Callable[[Optimizer, Optimizer], Optimizer]
CLOSE = 2e-4  # of the largest change: shards and whole tensors come to the same
GIVEN = ("state", "param_groups")
NOT_SHARED = (*GIVEN, "params", "defaults")
SMALL, STEPS = 8, 3  # rows and columns, and steps, of a trial
LARGE = 64  # so much on each rank where state is looked at: some quantise no less than 4096 numbers


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
        self.inside = 0  # calls of step(), of the class and of those that it calls super() of
        self.rounds: Iterator[bool] = iter(())  # of the step that is being taken

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
            self.inside, self.rounds = 0, iter(())
            self._put_back()

    @torch.no_grad()
    def _take(self, *_: Any) -> None:
        """Step in all rounds but the last of this rank's, in which step() goes on from here."""
        self.inside += 1
        if self.inside > 1:
            return
        self._put_stand_ins()
        self.rounds = self._rounds()
        before = None
        while not next(self.rounds, True):
            before = before or numbers_of(self.optimizer)
            step_once(self.optimizer)
            restore(self.optimizer, before)

    @torch.no_grad()
    def _give(self, *_: Any) -> None:
        self.inside -= 1
        if not self.inside:
            for _more in self.rounds:
                pass
            self._put_back()

    def _rounds(self) -> Iterator[bool]:
        """Bring parameters to their owners and back, a message's worth at a time, of which the next
        is on its way. Tell at each that this rank owns some of whether it is the last such."""
        batches = list(self._batches())
        last = max((i for i, (_, exchange) in enumerate(batches) if exchange.mine), default=-1)
        sent: list[Any] = [sent_to_owners(*batches[0])] if batches else []
        returning: list[Callable[[], None]] = []
        for i, (some, exchange) in enumerate(batches):
            arrived = sent.pop()
            sent += [sent_to_owners(*batch) for batch in batches[i + 1 : i + 2]]
            self._fill(some, *(wait() for wait in arrived))
            del arrived
            if exchange.mine:
                yield i == last
            for arrive in returning:
                arrive()
            returning = [self._returning(some, exchange)]
        for arrive in returning:
            arrive()

    def _batches(self) -> Iterator[tuple[list[Any], Exchange]]:
        sent: dict[Any, Any] = {
            p: ((p.dtype, p.grad.dtype), p.itemsize + p.grad.itemsize, p.shape)
            for p in self.sharded
            if p.grad is not None
        }
        for batch in in_messages(sent, self.group):
            yield batch, exchange_of(batch, [self.owner[id(p)] for p in batch])

    def _fill(
        self, some: Sequence[Any], weights: Mapping[int, Tensor], gradients: Mapping[int, Tensor]
    ) -> None:
        for place, gradient in gradients.items():
            stand_in = self.stand_ins[some[place]]
            device = local(some[place]).device
            stand_in.data, stand_in.grad = weights[place].to(device), gradient.to(device)

    def _returning(self, some: Sequence[Any], exchange: Exchange) -> Callable[[], None]:
        """Send weights back; the result waits for this rank's parts of them."""
        whole = {place: self.stand_ins[some[place]].data for place in exchange.mine}
        parts = exchange.to_shards(whole, some[0].dtype)
        for place in exchange.mine:
            self._empty(some[place])

        def arrive() -> None:
            for parameter, part in zip(some, parts(), strict=True):
                local(parameter).copy_(part)

        return arrive

    def _empty(self, parameter: nn.Parameter) -> None:
        stand_in = self.stand_ins[parameter]
        stand_in.data, stand_in.grad = hollow(parameter), None

    def _put_stand_ins(self) -> None:
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
            self._empty(parameter)

    # -- what is saved ------------------------------------------------------------------------

    def in_shards(
        self, whole: Mapping[str, Tensor], forms: Mapping[str, tuple[torch.dtype, list[int], int]]
    ) -> dict[str, Tensor]:
        """Put tensors of their owners into shards; all ranks know dtype, shape and owner of each,
        in the same order."""
        found: dict[str, Tensor] = {}
        sent = {
            path: (dtype, dtype.itemsize, torch.Size(shape))
            for path, (dtype, shape, _) in forms.items()
        }
        for paths in in_messages(sent, self.group):
            shapes, owners = [sent[path][2] for path in paths], [forms[path][2] for path in paths]
            exchange = Exchange(self.mesh, shapes, [0] * len(paths), owners)
            mine = {place: whole[paths[place]] for place in exchange.mine}
            parts = exchange.to_shards(mine, sent[paths[0]][0])()
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
        sent = {path: (tensor.dtype, tensor.itemsize, tensor.shape) for path, tensor in cut.items()}
        for paths in in_messages(sent, self.group):
            exchange = exchange_of([cut[p] for p in paths], [owners[p] for p in paths])
            came = exchange.to_owners([local(cut[p]) for p in paths])()
            found |= {p: as_it_lay(came[i], cut[p]) for i, p in enumerate(paths) if i in came}
        return found


def as_it_lay(tensor: Tensor, like: Tensor) -> Tensor:
    """Have it in memory in the order in which it was: what is multiplied rounds otherwise."""
    if like.stride() == tensor.stride():
        return tensor
    strided = torch.empty_strided(
        tensor.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return strided.copy_(tensor)


def sent_to_owners(some: Sequence[Any], exchange: Exchange) -> list[Callable[[], Any]]:
    """Begin to send weights and gradients."""
    both = (some, [parameter.grad for parameter in some])
    return [exchange.to_owners(list(map(local, values))) for values in both]


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()


def hollow(parameter: Tensor) -> Tensor:
    """Make something of its shape that takes no memory."""
    zero = torch.zeros((), dtype=parameter.dtype, device=local(parameter).device)
    return zero.expand(parameter.shape)


def in_messages(
    sent: Mapping[Key, tuple[Any, int, torch.Size]], group: dist.ProcessGroup
) -> Iterator[list[Key]]:
    """Put tensors of one kind together in messages; of each its kind, the bytes of an element and
    its shape are known."""
    for kind in dict.fromkeys(kind for kind, _, _ in sent.values()):
        alike = [key for key, (other, _, _) in sent.items() if other == kind]
        shapes, each = [sent[key][2] for key in alike], sent[alike[0]][1]
        for places in messages(shapes, each, dist.get_world_size(group)):
            yield [alike[place] for place in places]


# -- a step on some parameters at a time -----------------------------------------------------------


def step_once(optimizer: Optimizer) -> None:
    """Call step() as its class has it, without hooks."""
    call: Any = type(optimizer).step
    (call.__wrapped__ if getattr(call, "hooked", False) else call)(optimizer)


def numbers_of(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Copy the numbers that it keeps for a group, or for all of its parameters, such as a count of
    steps."""
    return [numbers_in(values) for values in shared_by_all(optimizer)]


def restore(optimizer: Optimizer, numbers: Sequence[dict[Any, Any]]) -> None:
    """Give it numbers that it had: the next of its parameters are to see them, too."""
    for values, before in zip(shared_by_all(optimizer), numbers, strict=True):
        set_numbers(values, before)


def shared_by_all(optimizer: Optimizer) -> list[dict[Any, Any]]:
    return [vars(optimizer), optimizer.state, *optimizer.param_groups]


def numbers_in(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copy the numbers in a dict, and in those inside it."""
    found: dict[Any, Any] = {}
    for key, value in values.items():
        if isinstance(key, Tensor) or key in NOT_SHARED:
            continue
        if isinstance(value, dict):
            found[key] = numbers_in(value)
        elif isinstance(value, Tensor) and value.numel() == 1 and not value._is_view():
            found[key] = value.clone()
        elif isinstance(value, (bool, int, float)):
            found[key] = value
    return found


def set_numbers(values: dict[Any, Any], numbers: Mapping[Any, Any], *, alone: bool = True) -> None:
    """Put numbers into a dict, and into those inside it; it has those alone then, or others too."""
    for key in numbers_in(values) if alone else ():
        if key not in numbers:
            del values[key]
    for key, number in numbers.items():
        now = values.get(key)
        if isinstance(now, dict) and isinstance(number, dict):
            set_numbers(now, number, alone=alone)
        elif isinstance(now, Tensor) and isinstance(number, Tensor):
            now.copy_(number)
        else:
            values[key] = number


# -- who needs it ----------------------------------------------------------------------------------


def owners_of(optimizer: Optimizer, on_shards: Callable[[], Any]) -> Owners | None:
    """Give a parameter an owner each, if a trial on small tensors says that this alone is right;
    refuse what is right neither so nor in shards."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = [parameter for parameter in every if is_cut(parameter)]
    others = {key: value for key, value in vars(optimizer).items() if key not in GIVEN}
    if not sharded or any(
        isinstance(v, (Optimizer, nn.Parameter)) for v in tree.tree_leaves(others)
    ):
        return None  # what it holds besides its groups would not be whole
    with unnoticed():
        try:
            wrong, owned = needs_owners(optimizer, sharded[0].device_mesh, on_shards)
        except Exception:  # noqa: BLE001 (code of libraries; its first step says what it cannot do)
            wrong, owned = "", False
    found = gather((wrong, owned))
    if all(own for _, own in found):
        return Owners(optimizer, sharded)
    for wrong, _ in found:
        if wrong:
            raise UsageError(
                f"{type(optimizer).__name__} {wrong}",
                'strategy="ddp" (fsdp.sharding_strategy) keeps them whole',
            )
    return None


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Try something without warnings, and without a trace in what is drawn later."""
    with (
        warnings.catch_warnings(),
        randomness_kept(),
        torch.compiler.set_stance("force_eager"),  # compiling takes longer than all trials
    ):
        warnings.simplefilter("ignore")
        yield


def resumes_alike(
    optimizer: Optimizer, on_shards: Callable[[], Any], resume: Between, *, owned: bool
) -> bool:
    """Tell whether a copy that takes over from another does the same steps, to the bit, on tensors
    as the optimizer will have them: whole, or in shards. A trial that fails says nothing."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    cut = [] if owned else [parameter for parameter in every if is_cut(parameter)]
    mesh = cut[0].device_mesh if cut else None
    spread = functools.partial(in_shards, mesh) if mesh is not None else whole
    most = LARGE * ranks_of(mesh), LARGE
    with unnoticed(), on_shards():
        try:
            found, expected = (
                trial(optimizer, mesh, spread, most=most, between=between).weights
                for between in (resume, lambda own, _other: own)
            )
        except Exception:  # noqa: BLE001 (code of libraries; its first step says what it cannot do)
            return True
    return all(one[1].equal(other[1]) for one, other in zip(found, expected, strict=True))


def needs_owners(
    optimizer: Optimizer, mesh: DeviceMesh, on_shards: Callable[[], Any]
) -> tuple[str, bool]:
    """Say what is wrong in shards, and whether each parameter could be treated by itself."""
    expected = trial(optimizer, mesh).weights
    try:
        with on_shards():
            found = trial(optimizer, mesh, functools.partial(in_shards, mesh)).weights
    except Exception as error:  # noqa: BLE001 (code of libraries)
        reason = next(iter(str(error).splitlines()), "")
        wrong = f"fails ({type(error).__name__} {reason}) with sharded parameters"
    else:
        if all(map(close, found, expected)):
            return "", False
        wrong = "comes to other weights with sharded parameters"
    if any(isinstance(key, Tensor) and value for key, value in optimizer.state.items()):
        return f"{wrong}, and has state of them before its first step", False
    wrong += ", and does not treat each of them by itself"
    if callable(getattr(optimizer, "eval", None)):
        return wrong, False  # owners have whole tensors in step() alone
    for late in (None, *range(len(expected))):  # a count of steps may begin with a first gradient
        together, in_turn = (trial(optimizer, mesh, late=late, in_turn=o) for o in (False, True))
        pairs = zip(together.weights, in_turn.weights, strict=True)
        alike = (one[1].equal(other[1]) for one, other in pairs)
        # What all parameters share may show in weights later on.
        if not all(alike) or together.numbers != in_turn.numbers:
            return wrong, False
    return wrong, True


def whole(value: Tensor) -> Tensor:
    return value


def in_shards(mesh: DeviceMesh, value: Tensor) -> Tensor:
    if not value.dim():
        return value
    places: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    return laid(distribute_tensor(value, mesh, [*places, Shard(0)], src_data_rank=None))


def laid(tensor: DTensor) -> DTensor:
    """Put this rank's part behind something else, as sharding does with gradients: what torch does
    to a tensor may depend on that."""
    part = tensor.to_local()
    there = part.new_empty(1 + part.numel())[1:].view_as(part).copy_(part)
    return DTensor.from_local(
        there, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Compare what two trials have come to, by how far they have gone."""
    (first, one), (_, other) = found, expected
    rounding = 1e-6 * float(other.abs().max())
    allowed = CLOSE * float((other - first).abs().max()) + rounding
    return bool((one - other).abs().max() <= allowed)


class DrawnAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Have what is drawn depend on its shape alone, and not on what was drawn before it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        return func(*args, **(kwargs or {}))


class Trial(NamedTuple):
    """Tells what some steps on small tensors have come to."""

    weights: list[tuple[Tensor, Tensor]]  # as they were, and as they are
    numbers: list[dict[Any, Any]]  # that they share


def trial(
    optimizer: Optimizer,
    mesh: DeviceMesh | None,  # of those that are in shards
    spread: Callable[[Tensor], Tensor] = whole,
    late: int | None = None,  # has no gradient in the first step
    *,
    in_turn: bool = False,  # each parameter by itself, with the numbers that all share
    most: tuple[int, int] = (SMALL, SMALL),  # rows, and what else there is
    between: Between | None = None,  # gives who takes the last step
) -> Trial:
    """Let a copy of an optimizer take some steps."""
    seed_all(0)
    first = local(optimizer.param_groups[0]["params"][0])
    device = first.device.type if mesh is None else mesh.device_type
    small = small_of(optimizer, mesh, most)
    drawn = {
        shape: [torch.randn(shape).to(device) for _ in range(STEPS + 1)]
        for shape in dict.fromkeys(small.values())
    }
    made = {key: nn.Parameter(spread(drawn[shape][0].clone())) for key, shape in small.items()}
    own = copied(optimizer, made)
    switch(own, "train")
    for step in range(1, STEPS + 1):
        if step == STEPS and between is not None:
            switch(own, "eval")
            own = between(own, copied(optimizer, made))
            switch(own, "train")
        given = [key for place, key in enumerate(small) if late != place or step > 1]
        before = numbers_of(own)
        for number, turn in enumerate([[key] for key in given if in_turn] or [given]):
            if number:
                restore(own, before)
            for key, parameter in made.items():
                gradient = drawn[small[key]][step].clone()
                parameter.grad = spread(gradient) if key in turn else None
            seed_all(0, step)
            with DrawnAlike():  # type: ignore[no-untyped-call]
                step_once(own)
    switch(own, "eval")
    values: list[Any] = [parameter.detach() for parameter in made.values()]
    ended = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
    pairs = [(drawn[shape][0], end) for shape, end in zip(small.values(), ended, strict=True)]
    return Trial(pairs, tree.tree_map(float, numbers_of(own)))


def switch(optimizer: Optimizer, mode: str) -> None:
    getattr(optimizer, mode, lambda: None)()


def small_of(
    optimizer: Optimizer, mesh: DeviceMesh | None, most: tuple[int, int]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Choose a small shape for the largest parameter of each number of dimensions in each group;
    all ranks have as much of it."""
    size, (rows, others) = ranks_of(mesh), most
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in sorted(group["params"], key=lambda each: -each.numel()):
            shape = [min(others, many) for many in parameter.shape]
            if shape:
                shape[0] = -(-min(rows, parameter.shape[0]) // size) * size
            found.setdefault((number, parameter.dim()), tuple(shape))
    return found


def ranks_of(mesh: DeviceMesh | None) -> int:
    return 1 if mesh is None else mesh.size(mesh.ndim - 1)


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
    if optimizer.state:
        own.state.update(first_state(own))
    return own


def first_state(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Make the state that the class makes together with an optimizer, for the same parameters."""
    known = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in known}
    return type(optimizer)([{**group} for group in optimizer.param_groups], **settings).state
