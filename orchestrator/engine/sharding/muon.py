"""Do the step of torch.optim.Muon on matrices in shards: each is orthogonalised whole, by one rank.

Momentum and weights stay in shards. What is orthogonalised travels in bf16, to which torch rounds
it anyway: so to a rank, and back, 4 bytes for each element that this rank has no part of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from orchestrator.engine.sharding.exchange import Exchange, dealt, exchange_of, is_cut, messages

of_torch: Any
try:
    from torch.optim import _muon as of_torch
except ImportError:  # torch 2.8 has none
    of_torch = None

LOW = torch.bfloat16  # in which torch iterates


@contextlib.contextmanager
def on_shards() -> Iterator[None]:
    """Have torch.optim.Muon compute its steps so."""
    if of_torch is None:
        yield
        return
    before = of_torch.muon
    of_torch.muon = step
    try:
        yield
    finally:
        of_torch.muon = before


def step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    muon_momentum_bufs: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    adjust_lr_fn: str | None,
    **iteration: Any,  # ns_coefficients, ns_steps, eps
) -> None:
    """Do what torch.optim._muon.muon does, which has these arguments."""
    lists = (params, grads, muon_momentum_bufs)
    cut = [i for i, parameter in enumerate(params) if is_cut(parameter)]
    rest = [[values[i] for i in range(len(params)) if i not in set(cut)] for values in lists]
    more = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": adjust_lr_fn}
    of_torch._single_tensor_muon(*rest, momentum=momentum, nesterov=nesterov, **more, **iteration)
    if not cut:
        return
    weights, gradients, means = ([local(values[i]) for i in cut] for values in lists)
    torch._foreach_lerp_(means, gradients, 1 - momentum)
    like = [params[i] for i in cut]
    rate = float(lr)
    torch._foreach_mul_(weights, 1 - rate * weight_decay)

    def part(i: int) -> Tensor:
        return (gradients[i].lerp(means[i], momentum) if nesterov else means[i]).to(LOW)

    for places, updates in orthogonal(like, part, iteration):
        for i, update in zip(places, updates, strict=True):
            far = of_torch._adjust_lr(rate, adjust_lr_fn, like[i].shape)
            weights[i].add_(update.to(weights[i].device), alpha=-far)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def orthogonal(
    like: Sequence[Any], part: Callable[[int], Tensor], iteration: Mapping[str, Any]
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Give this rank's parts of the matrices once they are orthogonal, with their places.

    Messages come and go while the matrices of another one are computed.
    """
    going: tuple[list[int], Callable[[], list[Tensor]]] | None = None
    coming: tuple[list[int], Exchange, Callable[[], dict[int, Tensor]]] | None = None
    mesh = like[0].device_mesh
    loads = [0.0] * mesh.size(mesh.ndim - 1)
    together = messages([tensor.shape for tensor in like], LOW.itemsize, len(loads))
    for places in [*together, None]:
        ahead = coming
        if places is not None:
            own = [like[i] for i in places]
            exchange = exchange_of(own, dealt([cost(tensor) for tensor in own], loads))
            coming = places, exchange, exchange.to_owners([part(i) for i in places])
        if ahead is not None:
            if going is not None:
                yield going[0], going[1]()
            going = ahead[0], ahead[1].to_shards(each_whole(ahead[2](), iteration), LOW)
    if going is not None:
        yield going[0], going[1]()


def cost(matrix: Tensor) -> float:
    rows, columns = matrix.shape
    return float(rows * columns * min(rows, columns))


def each_whole(whole: dict[int, Tensor], iteration: Mapping[str, Any]) -> dict[int, Tensor]:
    """Orthogonalise matrices, and let go of them one by one. Those of one shape go together on a
    GPU, which would wait for the host; on processors each goes as torch does it, whose bits a stack
    of them does not have."""
    keys = ("ns_coefficients", "ns_steps", "eps")
    settings = [iteration[key] for key in keys]
    by_shape: dict[torch.Size, list[int]] = {}
    for i, matrix in whole.items():
        by_shape.setdefault(matrix.shape, []).append(i)
    found: dict[int, Tensor] = {}
    for places in by_shape.values():
        if whole[places[0]].device.type == "cpu":
            for i in places:
                found[i] = of_torch._zeropower_via_newtonschulz(whole.pop(i), *settings)
        else:
            stack = torch.stack([whole.pop(i) for i in places])
            updates = orthogonal_stack(stack, *settings).unbind()
            found |= dict(zip(places, updates, strict=True))
    return found


def orthogonal_stack(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Do for a stack of matrices what torch does for one."""
    a, b, c = coefficients
    turned = matrices.size(1) > matrices.size(2)
    x = matrices.mT if turned else matrices
    norms = torch.stack([matrix.norm() for matrix in x])
    x = x / norms.clamp(min=eps)[:, None, None]
    for _step in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if turned else x
