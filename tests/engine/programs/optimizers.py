"""Optimizers as libraries and programs write them, with state of every kind."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from orchestrator.engine.core.together import one_of_several


class Own(Optimizer):
    """Changes each parameter by what change() says."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self.change(self.state[parameter], parameter.grad)
                    parameter.sub_(change, alpha=group.get("lr", 1e-2))

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return grad


class Lists(Own):
    """Keeps the last gradients, as Shampoo and SOAP keep their matrices."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        state["last"] = [*state.get("last", []), grad.clone()][-3:]
        state["turned"] = [grad.T.contiguous().T] if grad.dim() > 1 else ()
        state["nested"] = {"count": state.get("nested", {"count": 0})["count"] + 1}
        state["bounded"] = (*state.get("bounded", ()), grad.clone())[-2:]
        total = sum(state["turned"], state["last"][0] / state["nested"]["count"])
        total = sum(state["bounded"], total)
        for other in state["last"][1:]:
            total = total + other
        return total


class Opaque(Own):
    """Keeps what no file can hold."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        state["how"] = lambda grad: grad
        return grad


class ByTensor(Own):
    """Keeps state in its groups, by the parameters themselves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            past = group.setdefault("past", {})
            for parameter in group["params"]:
                past[parameter] = past.get(parameter, 0.0) + parameter.grad
                parameter.sub_(past[parameter], alpha=1e-2)


class Locked(Opaque):
    """Does so, too, and cannot be copied for a trial."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.lock = threading.Lock()


class Attribute(Own):
    """Adds an attribute to its state_dict()."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return grad / self.steps

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "steps"})


class Counting(Own):
    """Counts its steps, and says it to nobody; begins with numbers that the program has given."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.counted, self.least = {"steps": torch.zeros(1)}, 0.5

    def step(self, closure: Any = None) -> None:
        self.counted["steps"] += 1
        self.latest = 0.5 * getattr(self, "latest", 1.0)
        super().step()

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return grad / (self.counted["steps"] + self.latest + self.least)


class Drawing(Own):
    """Draws numbers of its own."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.draws = random.Random(0)

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return grad * self.draws.random()


class Unreadable(Own):
    """Does not take what it gives."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["optimizer"])


class Shared(Own):
    """Keeps state of all parameters together, as MADGRAD does."""

    def step(self, closure: Any = None) -> None:
        shared: Any = self.state
        shared["all"] = {"steps": shared.get("all", {"steps": 0})["steps"] + 1}
        super().step()

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        shared: Any = self.state
        return grad / shared["all"]["steps"]


class Inner(Optimizer):
    """Has an optimizer for matrices, and one for the rest: the recipe for one of both."""

    def __init__(self, parameters: Any) -> None:
        every = list(parameters)
        matrices = SGD([p for p in every if p.dim() > 1], lr=1e-2, momentum=0.9)
        self.parts = [matrices, AdamW([p for p in every if p.dim() < 2], lr=1e-2)]
        super().__init__(every, {"lr": 0.0})

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


class Norms(Own):
    """Keeps the square of each gradient's norm, changes it in place, and has numbers for keys."""

    def change(self, state: dict[Any, Any], grad: Tensor) -> Tensor:
        square = (grad * grad).sum()
        state.setdefault(0, {"square": torch.ones_like(square)})["square"].lerp_(square, 0.1)
        state["square"] = state["square"].lerp_(square, 0.1) if "square" in state else square
        return grad / (state["square"].sqrt() + state[0]["square"])


class InLists(Own):
    """Works on lists, with functions of which torch does not know all for shards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads: Any = [parameter.grad for parameter in every]
        before = [self.state[p].setdefault("before", torch.zeros_like(p)) for p in every]
        torch._foreach_maximum_(grads, -1e-2)
        torch._foreach_add_(before, grads)
        torch._foreach_add_(every, before, alpha=-1e-2)
        torch._foreach_copy_(before, grads)


class Finer(Own):
    """Keeps its means in more precision than the weights have."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        before = state.get("mean", torch.zeros_like(grad, dtype=torch.float32))
        state["mean"] = before.lerp(grad.float(), 0.1)
        state["kind"] = "finer"
        state["inside"] = {"means": [(state["mean"], "a text")]}
        return state["mean"].to(grad.dtype)


class Rateless(Own):
    """Finds out by itself how far to go."""

    def __init__(self, parameters: Any) -> None:
        Optimizer.__init__(self, parameters, {})


class Switching(SGD):
    """Wants to know whether it trains, as schedule-free ones do; notes its turns."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        self.turns: list[str] = []

    def train(self) -> None:
        self.turns.append("T")

    def eval(self) -> None:
        self.turns.append("E")

    def step(self, closure: Any = None) -> None:
        self.turns.append("s")
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.turns.append("z")
        super().zero_grad(set_to_none)


class Closing(Own):
    """Evaluates the loss by itself, as LBFGS does."""

    def step(self, closure: Any) -> None:
        closure()


class Closed(Own):
    """Does so, too, and says it only when it is called."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "no closure"


class Roots(Own):
    """Divides a matrix by roots of what its gradients were, on both sides, as Shampoo does."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        state["seen"] = state.get("seen", 0) + 1
        if grad.dim() != 2:
            return grad
        sides = state.setdefault("sides", [torch.eye(many) for many in grad.shape])
        for side, product in zip(sides, (grad @ grad.T, grad.T @ grad), strict=True):
            side.add_(product)
        left, right = (rooted(side) for side in sides)
        mean = state.setdefault("mean", torch.zeros_like(grad))
        mean.lerp_(left @ grad @ right, 0.5)
        return mean / state["seen"] ** 0.5


def rooted(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class Turned(Own):
    """Keeps matrices that lie in memory by columns, as SOAP does."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        if grad.dim() != 2:
            return grad
        base = state.get("base", torch.eye(len(grad)))  # which torch does not mix with shards
        state["base"] = torch.linalg.qr(grad @ grad.T @ base).Q
        state["like"] = (state["base"] @ grad).T.contiguous().T
        return state["like"].sin() + grad @ (state["like"].T @ grad)


class Taken(Roots):
    """Counts the steps of all, and goes less far in each; notes how much is whole at a time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.taken = torch.zeros(())
        self.bytes: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.taken += 1
        every = [p for group in self.param_groups for p in group["params"]]
        self.bytes.append(sum(p.untyped_storage().nbytes() for p in every))
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        counted = {int(self.taken), *(group["count"] for group in self.param_groups)}
        return super().change(state, grad) / sum(counted)


class Copying(Own):
    """Copies the first gradient as Python does, which torch cannot do to those of shards."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return grad + state.setdefault("first", copy.deepcopy(grad))


class Begun(Roots):
    """Makes its state as it is made."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["first"] = torch.ones_like(parameter)

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return super().change({}, grad * state["first"])


class Tossing(Roots):
    """Tosses a coin for all parameters, with the numbers of Python."""

    def step(self, closure: Any = None) -> None:
        self.double = random.random() < 0.5
        super().step()

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return super().change(state, grad) * (1 + self.double)


class Noisy(Own):
    """Adds noise to what it goes by."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return grad + torch.randn_like(grad)


class Coarse(Own):
    """Multiplies in bf16, in which the order of a sum shows."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        if grad.dim() != 2:
            return grad
        low = grad.bfloat16()
        return (low @ (low.T @ low)).to(grad.dtype)


class Roundabout(Roots):
    """Looks at all parameters together, besides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(parameter.grad.abs().sum()) for parameter in every)
        for parameter in every:
            parameter.grad.div_(1.0 + total)
        super().step()


class Gauging(Roots):
    """Sums up the gradients of a group, and goes by the sum much later, as D-Adaptation does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            every = [p for p in group["params"] if p.grad is not None]
            seen = sum(float(parameter.grad.abs().sum()) for parameter in every)
            group["seen"] = group.get("seen", 0.0) + seen
            group["steps"] = group.get("steps", 0) + 1
            for parameter in every if group["steps"] > 10 else ():
                parameter.grad.div_(1.0 + group["seen"])
        super().step()


def matrices(parameters: Any) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2)


def both(parameters: Any) -> Any:
    """Muon for matrices, and AdamW for the rest."""
    every = list(parameters)
    others = [p for p in every if p.dim() != 2]
    return one_of_several([matrices(every), AdamW(others, lr=1e-2)])


OWN = {
    "lists": Lists,
    "attribute": Attribute,
    "counting": Counting,
    "shared": Shared,
    "inner": Inner,
    "in lists": InLists,
    "norms": Norms,
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "amsgrad": lambda parameters: AdamW(parameters, lr=torch.tensor(1e-2), amsgrad=True),
}
