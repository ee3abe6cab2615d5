"""The model on its ranks, and everything that trains it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import nn

from orchestrator.config.schema import Config
from orchestrator.engine.core.kept import Kept
from orchestrator.engine.core.step import Stepper
from orchestrator.engine.models.losses import Loss
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.sharding.mesh import Mesh


@dataclass(frozen=True)
class Parts:
    """The model, spread over the ranks, and everything that trains it."""

    config: Config
    ranks: Ranks
    mesh: Mesh
    model: nn.Module  # spread over the ranks
    bare: nn.Module  # without what ddp puts around it
    losses: Loss
    stepper: Stepper

    @functools.cached_property
    def kept(self) -> Kept:
        """The optimizer's state, and what the program keeps beside it."""
        return Kept(self.stepper)
