"""Optimizers as libraries and programs write them, with state of every kind."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from orchestrator.engine.core.optimizer import one_of_several


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
        state["pair"] = (grad.T.contiguous().T, 2) if grad.dim() > 1 else ()
        state["nested"] = {"count": state.get("nested", {"count": 0})["count"] + 1}
        total = sum(state["last"], sum(state["pair"], state["last"][0]))
        return total / state["nested"]["count"]


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
    """Keeps the square of each gradient's norm, and changes it in place."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        square = (grad * grad).sum()
        state["square"] = state["square"].lerp_(square, 0.1) if "square" in state else square
        return grad / state["square"].sqrt()


class Rateless(Own):
    """Finds out by itself how far to go."""

    def __init__(self, parameters: Any) -> None:
        Optimizer.__init__(self, parameters, {})


class Closing(Own):
    """Evaluates the loss by itself, as LBFGS does."""

    def step(self, closure: Any) -> None:
        closure()


class Noisy(Own):
    """Adds noise to what it goes by."""

    def change(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return grad + torch.randn_like(grad)


def matrices(parameters: Any) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2)


def listed(parameters: Any) -> Any:
    """Two of a kind, which keep state under the same key, beside one that adds an attribute."""
    every = list(parameters)
    return one_of_several([Shared(every[:2]), Attribute(every[2:4]), Shared(every[4:])])


def both(parameters: Any) -> Any:
    """Muon for matrices, and AdamW for the rest."""
    every = list(parameters)
    others = [p for p in every if p.dim() != 2]
    return one_of_several([matrices(every), AdamW(others, lr=1e-2)])


# What a Trainer takes in shards: torch's own, and what the program says is element-wise.
ELEMENTWISE = ("attribute", "shared", "momentum", "amsgrad")
OWN = {
    "lists": Lists,
    "attribute": Attribute,
    "shared": Shared,
    "inner": Inner,
    "listed": listed,
    "norms": Norms,
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "amsgrad": lambda parameters: AdamW(parameters, lr=torch.tensor(1e-2), amsgrad=True),
}
