"""TensorBoard, W&B and MLflow by name, imported only when requested.

Only rank 0 uses them. One that cannot be imported is an error before training; one that fails
later costs its curves and a warning, never the run.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.config.parse import one_of
from orchestrator.engine.ranks.ranks import Ranks, gather
from orchestrator.errors import CheckFailed, OrchestratorError, UsageError, import_optional


class Tracker(Protocol):
    """Anything with these two methods; `trackers=` takes it as well as names."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    PACKAGES = ("tensorboard", "torch.utils.tensorboard")

    def __init__(self, **options: Any) -> None:
        directory = Path(os.environ.get("ORCHESTRATOR_EXPERIMENT", "."), "outputs", "tensorboard")
        tensorboard: Any = module("tensorboard", "torch.utils.tensorboard")
        self.writer = tensorboard.SummaryWriter(**{"log_dir": str(directory), **options})

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, **options: Any) -> None:
        self.run = module("wandb", "wandb").init(**options)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    def __init__(self, experiment_name: str | None = None, **options: Any) -> None:
        self.mlflow = module("mlflow", "mlflow")
        if experiment_name is not None:
            self.mlflow.set_experiment(experiment_name)
        self.mlflow.start_run(**options)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


KNOWN: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def module(package: str, name: str) -> Any:
    return import_optional(name, package, f"trackers: {package!r} needs a package that")


class Trackers:
    """All requested trackers on rank 0; none on the other ranks."""

    def __init__(
        self, wanted: Sequence[str | Tracker] | Mapping[str, Any], ranks: Ranks, say: Any
    ) -> None:
        self.say, self.all = say, []
        problem: Exception | None = None
        if ranks.rank == 0:
            try:
                self.all = started(wanted)
            except Exception as error:  # noqa: BLE001 (a tracker's own, too: all ranks hear of it)
                problem = error
        if self.all:
            atexit.register(self.close)
        first_problem = gather(str(problem) if problem else "")[0]
        if problem is not None and not isinstance(problem, OrchestratorError):
            raise problem
        if first_problem:
            raise CheckFailed(first_problem)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._do(lambda tracker: tracker.log(values, step))

    def close(self) -> None:
        self._do(lambda tracker: tracker.close())
        self.all = []

    def _do(self, what: Callable[[Tracker], None]) -> None:
        for tracker in list(self.all):
            try:
                what(tracker)
            except Exception as error:  # noqa: BLE001 (the network, a server, a full disk)
                self.all.remove(tracker)
                name = type(tracker).__name__
                self.say(f"WARNING: {name} failed and is switched off from now on: {error}")


def started(wanted: Sequence[str | Tracker] | Mapping[str, Any]) -> list[Tracker]:
    if isinstance(wanted, str):
        wanted = [wanted]
    options = wanted if isinstance(wanted, Mapping) else {}
    trackers: list[Tracker] = []
    for tracker in wanted:
        if isinstance(tracker, str):
            one_of("a tracker", tracker, tuple(KNOWN))
            trackers.append(KNOWN[tracker](**(options.get(tracker) or {})))
        elif callable(getattr(tracker, "log", None)) and callable(getattr(tracker, "close", None)):
            trackers.append(tracker)
        else:
            raise UsageError(
                f"trackers: {tracker!r} has no log(values, step) and close()",
                f"name one of {', '.join(KNOWN)}, or give an object that has both",
            )
    return trackers
