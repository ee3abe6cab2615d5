"""Keeps what a training has beside its model: the state of its optimizer, modules, programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.core.optimizer_state import (
    BY_NAME,
    Content,
    by_name,
    of_name,
    target,
    tensors_of,
)
from orchestrator.engine.core.step import Stepper, Steppers
from orchestrator.engine.saving.state import decoded

# By this name the place in the data is kept.
WHAT_IS_DRAWN = "what is drawn"


@dataclass(frozen=True)
class Snapshot:
    """Holds what is beside the model at one moment: the very tensors, and JSON that names them."""

    tensors: Mapping[str, Tensor]
    progress: Mapping[str, Any]


class AuxiliaryState:
    """Hold the optimizer's state, and what a program keeps: dicts, or objects with state_dict()."""

    def __init__(self, steppers: Steppers) -> None:
        self.steppers = steppers
        self.holders: dict[str, Any] = {}
        self.primed: dict[str, Tensor] | None = None  # what a resume is to fill

    def add(self, name: str, holder: Any) -> None:
        loads = hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")
        if not name or not isinstance(name, str) or name in self.holders:
            raise UsageError(f"keep({name!r}, ...): each thing needs a name of its own")
        if not isinstance(holder, dict) and not loads:
            raise UsageError(
                f"keep({name!r}, ...): a {type(holder).__name__} cannot be saved",
                "give a dict, or an object with state_dict() and load_state_dict()",
            )
        if not holder and isinstance(holder, dict):
            raise UsageError(
                f"keep({name!r}, ...): the dict is empty, and a resume fills what is there",
                "make all of it first, with the weights as the Trainer has spread them:"
                " {n: w.detach().clone() for n, w in trainer.bare.named_parameters()}",
            )
        content_of(name, holder)  # it raises for what no checkpoint can hold
        self.holders[name] = holder

    def _kept(self) -> dict[str, Content]:
        return {name: content_of(name, holder) for name, holder in self.holders.items()}

    # -- as a checkpoint asks for it, together with the optimizer -------------------------------

    def snapshot(self) -> Snapshot:
        """Ask each holder once: an optimizer may gather its state for that."""
        kept, tensors, optimizers = self._kept(), dict[str, Tensor](), {}
        for stepper in self.steppers:
            own = stepper.state.content()
            tensors |= prefixed(place_of(stepper), own.tensors)
            optimizer = {"text": own.text, "forms": own.forms, "unsaved": own.unsaved}
            optimizers[stepper.name] = {**stepper.progress(), "optimizer": optimizer}
        for content in kept.values():
            tensors |= prefixed("kept", content.tensors)
        forms = {path: form for content in kept.values() for path, form in content.forms.items()}
        texts = {"kept": {name: content.text for name, content in kept.items()}, "forms": forms}
        progress = {**by_name(optimizers), **(texts if kept else {})}
        return Snapshot(tensors, progress)

    def prime(self, progress: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Give the tensors that a checkpoint is to be read into."""
        refuse_other_names(self.steppers, progress)
        self.primed = {}
        for stepper in self.steppers:
            own = of_name(progress, stepper.name)
            stepper.refuse_other_class(own)
            self.primed |= prefixed(place_of(stepper), stepper.state.targets(own))
        for name, content in self._kept().items():
            if name in progress.get("kept", {}):
                wanted = tensors_of(progress["kept"][name])
                tensors = self._targets(name, set(wanted), content, progress["forms"])
                self.primed |= prefixed("kept", tensors)
        return self.primed

    def _targets(
        self, name: str, wanted: set[str], content: Content, forms: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Make for an object what it lacks: its load_state_dict() knows what to do with it."""
        now, device = content.tensors, self.steppers.device
        if wanted <= forms.keys() and not isinstance(self.holders[name], dict):
            return {path: target(forms[path], now.get(path), None, device) for path in wanted}
        if other := sorted(wanted ^ now.keys()):
            raise CheckFailed(
                f"what is kept as {name!r} has other tensors than in the checkpoint: {other[0]}"
                + (f" and {len(other) - 1} more" if other[1:] else ""),
                "make all of it before train(), as it was when it was saved",
            )
        return dict(now)

    def restore(self, progress: Mapping[str, Any]) -> None:
        primed, self.primed = self.primed or {}, None
        for stepper in self.steppers:
            own = of_name(progress, stepper.name)
            stepper.restore(own)
            stepper.state.load(own, unprefixed(place_of(stepper), primed))
        tensors = unprefixed("kept", primed)
        for name, text in progress.get("kept", {}).items():
            holder = self.holders.get(name)
            if holder is None:
                continue
            try:
                values = decoded(text, tensors)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckFailed(f"what was kept as {name!r} makes no sense ({error})") from None
            if isinstance(holder, dict):
                holder.clear()
                holder.update(values)
            else:
                holder.load_state_dict(values)

    def lacking(self, progress: Mapping[str, Any]) -> list[str]:
        """Name what a checkpoint has nothing of."""
        saved = progress["stepper"]
        unsaved = {
            name
            for stepper in self.steppers
            for name in of_name(saved, stepper.name).get("optimizer", {}).get("unsaved", [])
        }
        return [
            *(f"{name} of the optimizer" for name in sorted(unsaved)),
            *(
                name
                for name in self.holders
                if name not in saved.get("kept", {}) and name != WHAT_IS_DRAWN
            ),
        ]

    def unread(self, progress: Mapping[str, Any]) -> list[str]:
        """Name what a checkpoint has, and this program does not keep."""
        return [name for name in progress["stepper"].get("kept", {}) if name not in self.holders]


def place_of(stepper: Stepper) -> str:
    """Name what the tensors of an optimizer are kept under."""
    return f"optim {stepper.name}".rstrip()


def refuse_other_names(steppers: Steppers, progress: Mapping[str, Any]) -> None:
    saved = list(progress[BY_NAME]) if BY_NAME in progress else [""]
    if sorted(saved) != sorted(steppers.by_name):
        was, now = (", ".join(filter(None, names)) or "one" for names in (saved, steppers.by_name))
        raise CheckFailed(
            f"the checkpoint has other optimizers than this program: {was} there, {now} here",
            "resume with the optimizers that it was saved with, by the same names",
        )


def content_of(name: str, holder: Any) -> Content:
    content = Content()
    content.text = content.write(holder if isinstance(holder, dict) else holder.state_dict(), name)
    return content


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{path}": tensor for path, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
