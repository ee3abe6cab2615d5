"""Train PyTorch models on machines that you reach only by SSH."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from orchestrator.common.version import __version__

if TYPE_CHECKING:
    from orchestrator.api.cluster import Cluster
    from orchestrator.api.job import Job, Line, Receipt, Verdict
    from orchestrator.common.errors import JobFailed, NoRestart, OrchestratorError
    from orchestrator.engine.saving.memory import (
        load_memory_checkpoint,
        memory_checkpoint,
    )
    from orchestrator.engine.trainer import Trainer

__all__ = [
    "Cluster",
    "Job",
    "JobFailed",
    "Line",
    "NoRestart",
    "OrchestratorError",
    "Receipt",
    "Trainer",
    "Verdict",
    "__version__",
    "load_memory_checkpoint",
    "memory_checkpoint",
]

# Imported when somebody asks for it: the head must not load torch, nor a command what it needs not.
LATER = {
    "Cluster": "orchestrator.api.cluster",
    "Job": "orchestrator.api.job",
    "JobFailed": "orchestrator.common.errors",
    "Line": "orchestrator.api.job",
    "NoRestart": "orchestrator.common.errors",
    "OrchestratorError": "orchestrator.common.errors",
    "Receipt": "orchestrator.api.job",
    "Trainer": "orchestrator.engine.trainer",
    "Verdict": "orchestrator.api.job",
    "load_memory_checkpoint": "orchestrator.engine.saving.memory",
    "memory_checkpoint": "orchestrator.engine.saving.memory",
}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LATER[name]), name)
