"""Turn summed gradients into an optimizer step: norm, clipping, skipping, loss scale.

All numbers that ranks must agree on travel in one small all-reduce per step. On the fused path
nothing here waits for the device: the host learns of a skipped step when it next reads the results.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.schema import TrainingConfig
from orchestrator.engine.core.average import Average
from orchestrator.engine.core.optimizer import (
    Factory,
    LrScheduler,
    fuse_kernels,
    is_summed,
    lr_multiplied,
    parts_of,
    rebind_optimizer,
    refuse_not_elementwise,
    step_optimizer,
    step_unless,
)
from orchestrator.engine.models.losses import Totals, loss_of
from orchestrator.engine.observe.reporter import BAD, StepReport
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.randomness import seed_all
from orchestrator.engine.ranks.ranks import from_rank_0
from orchestrator.engine.sharding.blocks import has_sparse, sum_whole
from orchestrator.engine.sharding.mesh import Mesh, local_tensor, whole_parameters

Sums = Mapping[str, tuple[Tensor, Tensor]]

# The scale of fp16 losses, as in torch.amp. It grows after so many good steps in a row.
FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GROW_AFTER = 2000


class StepOutcome(NamedTuple):
    """The results of a step of one optimizer."""

    grad_norm: Tensor
    bad: Tensor
    scale: float | Tensor
    lr: float | Tensor


class Stepper:
    """Drives a torch optimizer on the sharded parameters of a model.

    It calls only the public contract: step() on gradients that are divided and clipped,
    zero_grad(), state_dict() and load_state_dict(). Fused kernels of torch's AdamW and Adam skip a
    bad step on the device, so that the host does not wait.
    """

    def __init__(
        self,
        optimizer: Optimizer | Factory,
        names: Mapping[int, str],
        model: nn.Module,
        mesh: Mesh,
        training: TrainingConfig,
        *,
        # The optimizer's name, if there are several, and the steps of the training per own step.
        name: str = "",
        every: int = 1,
        scheduler: Any = None,
        scheduler_every: str = "step",
        lr_factor: Callable[[int], float] = lambda step: 1.0,
        # The usual count of a full step. Losses are divided by it, which keeps sums near one.
        nominal: float | None = None,
        # A resume keeps this program's learning rate, weight decay and so on, not the saved ones.
        keeps_settings: bool = False,
        # The program declares that its optimizer updates each element by itself.
        elementwise: bool = False,
    ) -> None:
        self.mesh, self.training, self.lr_factor = mesh, training, lr_factor
        self.name, self.loss, self.every = name, loss_of(name), every
        self.parameters = dict(plain_names.named_parameters(model))
        self.optimizer = rebind_optimizer(optimizer, names, self.parameters, name)
        self.scheduler = LrScheduler(scheduler, self.optimizer, scheduler_every)
        chosen = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.named = [(key, p) for key, p in self.parameters.items() if id(p) in chosen]
        fused = (
            [fuse_kernels(part) for part in parts_of(self.optimizer)]
            if not has_sparse(model)
            else []
        )
        # Several optimizers in a list use fused kernels as well, but skip bad steps on the host.
        self.fused = fused == [True]
        for part in parts_of(self.optimizer) if mesh.mesh is not None and not elementwise else ():
            refuse_not_elementwise(part)
        self.device = local_tensor(next(iter(self.parameters.values()))).device
        self.keeps_settings = keeps_settings
        self.average: Average | None = None
        if training.ema is not None:
            self.average = Average(training.ema, self.named)
        self.scaling = training.mixed_precision == "fp16"
        self.nominal = nominal
        self.scale: Tensor | float = 1.0
        if self.scaling:
            self.scale = torch.tensor(FIRST_SCALE, device=self.device)
        self.good, self.skipped = (torch.zeros((), device=self.device) for _ in range(2))

    # -- a step -------------------------------------------------------------------------------

    def scaled(self, loss: Tensor, count: Tensor, *, real: bool = True) -> Tensor:
        """Scale a sum of losses so that low precision can represent its gradients."""
        if self.nominal is None:
            self.nominal = self._usual_count(count)
        return loss * (self.scale * (real / self.nominal))

    def _usual_count(self, count: Tensor) -> float:
        """Return the count of rank 0's first micro-batch.

        Hooks then see the gradients of a mean, as in a plain loop. fp16 uses the estimated count of
        a whole step, as a power of two: dividing by that rounds no gradient.
        """
        usual = from_rank_0(float(count))
        if not self.scaling:
            return usual or 1.0
        total = usual * dist.get_world_size() * self.training.gradient_accumulation
        return float(2.0 ** math.ceil(math.log2(max(1.0, total))))

    def step(
        self, step: int, squares: Tensor, loss: Tensor, count: Tensor, apart: Tensor | None
    ) -> StepOutcome:
        # The summed gradients are scale / nominal times the gradient of the sum of all losses.
        scale = self.scale
        divisor = count * (scale / (self.nominal or 1.0))
        # Each copy of the parameters has contributed the same squares to the sum.
        norm = (squares / self.mesh.copies).sqrt() / divisor
        if most := self.training.grad_clip_norm:
            divisor = divisor * ((norm + 1e-6) / most).clamp(min=1.0)
        bad = (norm + loss).isfinite().logical_not().float()
        if apart is not None:
            bad = torch.maximum(bad, apart)
        lr = self._apply(step, divisor, bad)
        if self.average is not None:
            self.average.update(bad)
        self._count(bad, count)
        return StepOutcome(norm, bad, scale, lr)

    def _apply(self, step: int, divisor: Tensor, bad: Tensor) -> float | Tensor:
        lr, lr_factor = self.optimizer.param_groups[0].get("lr"), self.lr_factor(step)
        with lr_multiplied(self.optimizer, lr_factor):
            # Where the host need not wait to know a good step, a plain call costs less.
            if self.fused and (self.device.type != "cpu" or bad.item()):
                self._multiply(1.0 / divisor)
                step_unless(self.optimizer, bad)
            elif not bad.item():
                self._multiply(1.0 / divisor.item())
                if not self.fused:
                    # One that draws random numbers draws the same on each copy and a resume.
                    seed_all(self.training.seed, step)
                step_optimizer(self.optimizer)
        return math.nan if lr is None else lr * lr_factor

    def _multiply(self, factor: float | Tensor) -> None:
        dense = []
        for _, parameter in self.named:
            grad = parameter.grad
            # A sparse gradient is not multiplied in place: that would change only a copy of it.
            if grad is not None and grad.is_sparse:
                parameter.grad = torch.mul(grad, factor)
            elif grad is not None:
                dense.append(local_tensor(grad))
        if dense:
            number = factor.to(dense[0].dtype) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(dense, number)

    def squares(self, whole: set[int]) -> Tensor:
        trained = [p for _, p in self.named if p.grad is not None]
        sharded = squares_of([p.grad for p in trained if id(p) not in whole]).to(self.device)
        if not whole:
            return sharded
        # Sharded parameters are counted once per copy, these once per rank.
        once = squares_of([p.grad for p in trained if id(p) in whole]).to(self.device)
        return sharded + once * (self.mesh.copies / dist.get_world_size())

    def _count(self, bad: Tensor, count: Tensor) -> None:
        self.skipped += bad
        if not isinstance(self.scale, Tensor):
            return
        # A step in which no target counts is bad, but no reason to lower the scale.
        lost = bad * (count > 0)
        self.good = (self.good + 1) * (1 - bad)
        grow = 1.0 + (self.good >= GROW_AFTER).float()
        self.good *= self.good < GROW_AFTER
        self.scale = (self.scale * (1 - lost / 2) * grow).clamp(1.0, LARGEST_SCALE)

    # -- state for checkpoints ------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """Return the state beside that of the optimizer, ready for JSON."""
        return {
            "class": type(self.optimizer).__name__,
            "scale": self.scale.item() if isinstance(self.scale, Tensor) else None,
            "nominal": self.nominal,
            "good": self.good.item(),
            "bad": self.skipped.item(),
        }

    def refuse_other_class(self, progress: Mapping[str, Any]) -> None:
        kind = type(self.optimizer).__name__
        if progress.get("class", kind) != kind:
            raise CheckFailed(
                "the checkpoint does not fit this model and optimizer: it was saved with"
                f" {progress['class']}, this is {kind}",
                "resume with the optimizer that it was saved with",
            )

    def restore(self, progress: Mapping[str, Any]) -> None:
        if isinstance(self.scale, Tensor) and progress["scale"] is not None:
            self.scale.fill_(progress["scale"])
        self.nominal = self.nominal or progress["nominal"]
        self.good.fill_(progress["good"])
        self.skipped.fill_(progress["bad"])


class Steppers:
    """All optimizers of a training by name, or a single one under the empty name.

    The optimizers that are due in a step take it together.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer | Factory],
        names: Mapping[int, str],
        model: nn.Module,
        mesh: Mesh,
        # These are by the optimizers' names. An optimizer that is not in `every` takes every step.
        training: Mapping[str, TrainingConfig],
        every: Mapping[str, int],
        schedulers: Mapping[str, Any],
        **more: Any,
    ) -> None:
        self.model, self.mesh = model, mesh
        self.by_name = {
            name: Stepper(
                optimizer,
                names,
                model,
                mesh,
                training[name],
                name=name,
                every=every.get(name, 1),
                scheduler=schedulers.get(name),
                **more,
            )
            for name, optimizer in optimizers.items()
        }
        self.due = [*self.by_name.values()]
        self.several = "" not in self.by_name
        self.first = next(iter(self.by_name.values()))
        self.parameters, self.device = self.first.parameters, self.first.device
        self.left = [p for p in self.parameters.values() if not is_summed(p, mesh)]
        # Whole parameters by the ids of the sharded ones.
        self.gathered: dict[int, nn.Parameter] = {}

    def __iter__(self) -> Iterator[Stepper]:
        return iter(self.by_name.values())

    def begin(self, step: int) -> None:
        """Choose the optimizers that are due in this step."""
        self.due = [stepper for stepper in self if step % stepper.every == 0]

    @property
    def names_due(self) -> tuple[str, ...]:
        return tuple(stepper.name for stepper in self.due)

    @property
    def all_due(self) -> bool:
        return len(self.due) == len(self.by_name)

    @property
    def sums_itself(self) -> bool:
        """True if this class sums the gradients of this step, because ddp would wait for all."""
        return not self.all_due and self.mesh.strategy == "ddp"

    @property
    def whole(self) -> list[nn.Parameter]:
        """The parameters whose gradients this class sums over the ranks.

        Sharding leaves some parameters whole. ddp only knows those that were trained when it was
        made, not those that are unfrozen later.
        """
        left = self.left
        if self.sums_itself:
            left = [parameter for stepper in self.due for _, parameter in stepper.named]
        return [parameter for parameter in left if parameter.requires_grad]

    # -- a step -------------------------------------------------------------------------------

    def find_whole(self) -> None:
        """Gather each block once and keep its whole parameters. Every rank calls it.

        The backward of several losses takes whole parameters as its inputs, and FSDP fails on a
        block that was never gathered.
        """
        if self.mesh.mesh is not None and not self.gathered:
            self.gathered = whole_parameters(self.model)

    def backward(self, totals: Totals, run: Callable[..., None], *, real: bool) -> None:
        """Compute a micro-batch's gradients: of each loss only for its optimizer's parameters."""
        for stepper in self.due:
            loss, count = totals[stepper.loss]
            scaled, last = stepper.scaled(loss, count, real=real), stepper is self.due[-1]
            if not self.several:
                run(scaled)
                continue
            inputs = [self.gathered.get(id(p), p) for _, p in stepper.named if p.requires_grad]
            if isinstance(self.model, FSDPModule):
                self.model.set_is_last_backward(last)
            if inputs:
                run(scaled, inputs=inputs, retain_graph=not last)

    def add_up(self, sums: Sums) -> tuple[Tensor, Tensor | None]:
        """Return sums over all ranks: squared gradients, then a sum and a count per name.

        For a sharded model the second result is 1.0 if ranks used different parts of the model:
        FSDP has then summed gradients of different parts with each other.
        """
        whole = self.whole
        for stepper in self:
            if sum(len(g["params"]) for g in stepper.optimizer.param_groups) != len(stepper.named):
                raise UsageError(
                    "the optimizer was given other parameters after the Trainer was made",
                    "give it all of them from the start: those that are frozen"
                    " (requires_grad=False) stay as they are until a hook unfreezes them",
                )
        sum_whole(whole)
        flat = [value.to(self.device) for pair in sums.values() for value in pair]
        sharded = self.mesh.mesh is not None
        if sharded:
            used = zlib.crc32(bytes(p.grad is not None for p in self.parameters.values())) & 0x3FFF
            flat += torch.tensor([used, used**2], dtype=torch.float64).to(self.device)
        known = {id(parameter) for parameter in whole}
        squares = [stepper.squares(known) for stepper in self]
        total, world = torch.stack([*squares, *flat]), dist.get_world_size()
        if world > 1:
            dist.all_reduce(total)
        if not sharded:
            return total, None
        # The mean of squares equals the square of the mean only if all numbers are equal.
        return total[:-2], (total[-1] * world != total[-2] ** 2).float()

    def step(
        self, step: int, names: tuple[str, ...], total: Tensor, apart: Tensor | None = None
    ) -> StepReport:
        values, count = total.unbind(), len(self.by_name)
        outcomes = {}
        for index, stepper in enumerate(self):
            if stepper in self.due:
                at = count + 2 * names.index(stepper.loss)
                loss, number = values[at], values[at + 1]
                outcomes[stepper.name] = stepper.step(step, values[index], loss, number, apart)
        self._forget()
        norm, bad, scale, lr = outcomes[self.due[0].name]
        each: dict[str, float | Tensor] = {}
        if self.several:
            norm = torch.stack([outcomes[name].grad_norm for name in self.names_due]).norm()
            bad = torch.stack([outcome.bad for outcome in outcomes.values()]).max()
            if isinstance(scale, Tensor):
                scale = torch.stack([torch.as_tensor(o.scale) for o in outcomes.values()]).max()
            for name, outcome in outcomes.items():
                each |= {f"lr_{name}": outcome.lr, f"grad_norm_{name}": outcome.grad_norm}
                each[f"{BAD}{name}"] = outcome.bad
        found = {"grad_norm": norm, "bad": bad, "apart": apart, "scale": scale, "lr": lr}
        return StepReport(step, names, total[count:], {**found, **each})

    def _forget(self) -> None:
        for stepper in self:
            stepper.optimizer.zero_grad()
        # Parameters that are in no optimizer have gradients as well.
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextlib.contextmanager
    def evaluating(self, *, average: bool = True) -> Iterator[None]:
        """Put the averaged weights into the model within the block, if there are any."""
        with contextlib.ExitStack() as shown:
            for stepper in self:
                if stepper.average is not None and average:
                    shown.enter_context(stepper.average.shown())
            yield


def squares_of(grads: Iterable[Tensor | None]) -> Tensor:
    local = (local_tensor(grad) for grad in grads if grad is not None)
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in local]
    values = [value for value in values if value.numel()]
    if not values:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(values)).double().square().sum()
