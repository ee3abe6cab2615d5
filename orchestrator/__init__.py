"""Train PyTorch models on machines that you reach only by SSH."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from orchestrator.common.version import __version__

if TYPE_CHECKING:
    from orchestrator.api.cluster import Cluster
    from orchestrator.api.job import Job, Line, Verdict
    from orchestrator.common.errors import JobFailed, NoRestart, OrchestratorError
    from orchestrator.engine.trainer import Trainer
    from orchestrator.records.outcome import Receipt

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
]

# Imported on first access: the head must not load torch, and commands start faster.
LATER = {
    "Cluster": "orchestrator.api.cluster",
    "Job": "orchestrator.api.job",
    "JobFailed": "orchestrator.common.errors",
    "Line": "orchestrator.api.job",
    "NoRestart": "orchestrator.common.errors",
    "OrchestratorError": "orchestrator.common.errors",
    "Receipt": "orchestrator.records.outcome",
    "Trainer": "orchestrator.engine.trainer",
    "Verdict": "orchestrator.api.job",
}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LATER[name]), name)
