"""Opens each tracker so that a training that resumes continues its own curves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from orchestrator.common.errors import UsageError, import_optional


class Tracker(Protocol):
    """Anything with these two methods; `trackers=` of a Trainer takes it as well as names."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Curves:
    """Name the curves that values belong to. The same id continues the same curves."""

    id: str
    name: str = ""  # what people see; a tracker chooses one where it is empty
    step: int = 0  # values after it are about to come; those of an earlier attempt do not count
    directory: Path = Path()  # for what is written to files
    beside: bool = False  # others of this process are open at the same time
    axis: str = ""  # what the steps count, where they come from many and in no order


class Opened(Protocol):
    """One of KNOWN, ready for values: of a step, and of a moment in Unix seconds."""

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, curves: Curves, log_dir: str | Path | None = None, **options: Any) -> None:
        # Not torch's writer: a head has no torch, and that one keeps no moments.
        writing = module("tensorboard", "tensorboard.summary.writer.event_file_writer")
        self.events = module("tensorboard", "tensorboard.compat.proto.event_pb2")
        self.summaries = module("tensorboard", "tensorboard.compat.proto.summary_pb2")
        directory = Path(log_dir or curves.directory / "tensorboard").expanduser()
        self.writer = writing.EventFileWriter(str(directory), **options)
        if curves.step:
            start = self.events.SessionLog(status=self.events.SessionLog.START)
            self.writer.add_event(self.events.Event(step=curves.step + 1, session_log=start))

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None:
        value = self.summaries.Summary.Value
        summaries = [value(tag=name, simple_value=number) for name, number in values.items()]
        summary = self.summaries.Summary(value=summaries)
        self.writer.add_event(self.events.Event(wall_time=moment, step=step, summary=summary))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, curves: Curves, **options: Any) -> None:
        wandb = module("wandb", "wandb")
        settings = {"id": curves.id, "resume": "allow", "name": curves.name or None}
        if curves.beside:
            settings["reinit"] = "create_new"
        self.run, self.axis = wandb.init(**{**settings, **options}), curves.axis
        if self.axis:  # W&B drops a step that is less than the one before
            self.run.define_metric("*", step_metric=self.axis)

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None:
        row = {**values, "_timestamp": moment}
        if self.axis:
            self.run.log({**row, self.axis: step})
        else:
            self.run.log(row, step=step)

    def close(self) -> None:
        self.run.finish()


def accepted(name: str) -> str:
    """Return a name that MLflow takes: it may keep each as a file, and one that it refuses costs
    the whole line."""
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    plain = "/".join(part for part in parts if part not in ("", ".", "..")) or "_"
    return f"_{plain}" if plain.startswith("..") else plain


class MLflow:
    TAG = "orchestrator.curves"

    def __init__(self, curves: Curves, experiment_name: str | None = None, **options: Any) -> None:
        self.mlflow = module("mlflow", "mlflow")
        self.entities = module("mlflow", "mlflow.entities")
        if self.mlflow.get_tracking_uri().startswith("sqlite:") and not find_spec("sqlalchemy"):
            # mlflow-skinny has no use for its own default, a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.mlflow.set_tracking_uri((curves.directory.absolute() / "mlruns").as_uri())
        if experiment_name is not None:
            self.mlflow.set_experiment(experiment_name)
        self.client = self.mlflow.MlflowClient()
        if "run_id" not in options:
            options = {**options, **self._same_run(curves)}
        if curves.beside:
            options = {"nested": True, **options}
        self.run = self.mlflow.start_run(**options).info.run_id
        self.last = {} if curves.axis else self._last_steps()

    def _same_run(self, curves: Curves) -> dict[str, Any]:
        """Choose the run that has these curves, or name and mark a new one."""
        ours = f"tags.`{self.TAG}` = '{curves.id}'"
        found = self.mlflow.search_runs(filter_string=ours, max_results=1, output_format="list")
        if found:
            return {"run_id": found[0].info.run_id}
        named = {"run_name": curves.name} if curves.name else {}
        return {**named, "tags": {self.TAG: curves.id}}

    def _last_steps(self) -> dict[str, int]:
        """Return the step up to which each metric is there: of two values of a step, which a
        training that goes on from an earlier one would send, MLflow draws both."""
        known = self.client.get_run(self.run).data.metrics
        points = {name: self.client.get_metric_history(self.run, name) for name in known}
        return {name: max(point.step for point in some) for name, some in points.items()}

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None:
        at = int(moment * 1e3)
        named = {accepted(name): number for name, number in values.items()}
        new = {name: number for name, number in named.items() if step > self.last.get(name, -1)}
        metrics = [self.entities.Metric(name, number, at, step) for name, number in new.items()]
        if metrics:
            self.client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run)
        self.mlflow.end_run()


@dataclass(frozen=True)
class Known:
    open: Callable[..., Opened]
    imports: str
    package: str


KNOWN = {
    "tensorboard": Known(TensorBoard, "tensorboard", "tensorboard"),
    "wandb": Known(WandB, "wandb", "wandb"),
    "mlflow": Known(MLflow, "mlflow", "mlflow"),
}


def opened(name: str, curves: Curves, options: Mapping[str, Any]) -> Opened:
    """Open one of KNOWN; a UsageError says which option it does not know."""
    try:
        return KNOWN[name].open(curves, **options)
    except TypeError as error:
        what = f"{name} could not be opened: {error}"
        raise UsageError(what, "leave that option out, or correct its name") from error


def module(package: str, name: str) -> Any:
    return import_optional(name, package, f"trackers: {package!r} needs a package that")
