"""Opens each tracker, so that a resumed training continues its curves; sends in a thread."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from orchestrator.common.errors import OrchestratorError, UsageError, import_optional
from orchestrator.common.text import Say


class Tracker(Protocol):
    """Any object with these two methods; `trackers=` of a Trainer takes it as well as names."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Curves:
    """The curves that values belong to. The same id continues the same curves."""

    id: str
    # The displayed name; if it is empty, the tracker chooses one.
    name: str = ""
    # The last step to keep: values of an earlier attempt after it do not count.
    step: int = 0
    # The directory for trackers that write files.
    directory: Path = Path()
    # Set if the process has other curves open at the same time.
    beside: bool = False
    # The unit of the steps, if they come from several sources in no order.
    axis: str = ""


class Opened(Protocol):
    """An open tracker of KNOWN; it takes values of a step at a Unix time."""

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, curves: Curves, log_dir: str | Path | None = None, **options: Any) -> None:
        # Not torch's writer: a head has no torch, and that one keeps no moments.
        writing = import_tracker("tensorboard", "tensorboard.summary.writer.event_file_writer")
        self.events = import_tracker("tensorboard", "tensorboard.compat.proto.event_pb2")
        self.summaries = import_tracker("tensorboard", "tensorboard.compat.proto.summary_pb2")
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
        wandb = import_tracker("wandb", "wandb")
        settings = {"id": curves.id, "resume": "allow", "name": curves.name or None}
        if curves.beside:
            settings["reinit"] = "create_new"
        self.run, self.axis = wandb.init(**{**settings, **options}), curves.axis
        # W&B drops a step that is less than the previous one.
        if self.axis:
            self.run.define_metric("*", step_metric=self.axis)

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None:
        row = {**values, "_timestamp": moment}
        if self.axis:
            self.run.log({**row, self.axis: step})
        else:
            self.run.log(row, step=step)

    def close(self) -> None:
        self.run.finish()


def accepted_name(name: str) -> str:
    """Return a name that MLflow accepts: it may keep each metric as a file.

    A name that it rejects would cost the whole line.
    """
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    plain = "/".join(part for part in parts if part not in ("", ".", "..")) or "_"
    return f"_{plain}" if plain.startswith("..") else plain


class MLflow:
    TAG = "orchestrator.curves"

    def __init__(self, curves: Curves, experiment_name: str | None = None, **options: Any) -> None:
        self.mlflow = import_tracker("mlflow", "mlflow")
        self.entities = import_tracker("mlflow", "mlflow.entities")
        if self.mlflow.get_tracking_uri().startswith("sqlite:") and not find_spec("sqlalchemy"):
            # mlflow-skinny cannot use its own default, a database.
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
        """Return the options that continue the run of these curves, or name and mark a new one."""
        ours = f"tags.`{self.TAG}` = '{curves.id}'"
        found = self.mlflow.search_runs(filter_string=ours, max_results=1, output_format="list")
        if found:
            return {"run_id": found[0].info.run_id}
        named = {"run_name": curves.name} if curves.name else {}
        return {**named, "tags": {self.TAG: curves.id}}

    def _last_steps(self) -> dict[str, int]:
        """Return the last step of each metric.

        A resumed training sends some steps again, and MLflow would draw both values of a step.
        """
        known = self.client.get_run(self.run).data.metrics
        points = {name: self.client.get_metric_history(self.run, name) for name in known}
        return {name: max(point.step for point in some) for name, some in points.items()}

    def log(self, values: Mapping[str, float], step: int, moment: float) -> None:
        at = int(moment * 1e3)
        named = {accepted_name(name): number for name, number in values.items()}
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


def open_tracker(name: str, curves: Curves, options: Mapping[str, Any]) -> Opened:
    """Open a tracker of KNOWN; raise UsageError for an option that it does not know."""
    try:
        return KNOWN[name].open(curves, **options)
    except TypeError as error:
        what = f"{name} could not be opened: {error}"
        raise UsageError(what, "leave that option out, or correct its name") from error


def import_tracker(package: str, name: str) -> Any:
    return import_optional(name, package, f"trackers: {package!r} needs a package that")


# -- sending without waiting ------------------------------------------------------------------


# The limit of lines that wait for a tracker; later ones are left out.
WAITING_LINES = 10_000
# The time that the end of a training waits for a tracker.
LAST_SECONDS = 60.0
# How often `close` checks whether the tracker's thread still runs.
LOOK_SECONDS = 0.2


class Sending:
    """A tracker and the thread that opens it and sends to it.

    A failure ends the curves of this tracker with one warning. A tracker that hangs delays nothing
    else.
    """

    def __init__(self, name: str, open: Callable[[], Opened], say: Say) -> None:
        self.name, self.open, self.say = name, open, say
        self.lines: queue.Queue[tuple[Mapping[str, float], int, float] | None] = queue.Queue(
            WAITING_LINES
        )
        self.left_out = 0
        self.sent = 0
        self.failed = False
        # The error of an option that the tracker does not know.
        self.refusal: OrchestratorError | None = None
        # Set once the tracker was opened, or could not be.
        self.tried = threading.Event()
        # False once `wait_open` has timed out.
        self.awaited = True
        self.given_up = False
        self.thread = threading.Thread(target=self._send, name=f"to {name}", daemon=True)
        self.thread.start()

    def wait_open(self, seconds: float | None = None) -> None:
        """Wait until it is open or has failed, and raise an error that the user must fix."""
        if not self.tried.wait(seconds):
            self.awaited = False
            self.say(f"{self.name} does not open yet; nothing waits for it")
        if self.refusal is not None:
            raise self.refusal

    def log(self, values: Mapping[str, float], step: int, moment: float | None = None) -> None:
        if self.failed:
            return
        try:
            self.lines.put_nowait((values, step, time.time() if moment is None else moment))
        except queue.Full:
            if not self.left_out:
                self.say(f"WARNING: {self.name} is too slow: some values are left out there")
            self.left_out += 1

    def close(self) -> None:
        """Send the lines that wait, for a limited time; a second call does nothing."""
        end = time.monotonic() + LAST_SECONDS
        while self.thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Full):
                # The queue stays full while the tracker hangs, so the thread is checked between
                # tries.
                self.lines.put(None, timeout=LOOK_SECONDS)
                break
        self.thread.join(max(0.0, end - time.monotonic()))
        if self.thread.is_alive():
            self.given_up = True
            self.say(f"WARNING: {self.name} did not take all values within {LAST_SECONDS:g} s")

    def _send(self) -> None:
        what = "could not be opened, and gets no values"
        try:
            tracker = self.open()
            what = "failed and is switched off from now on"
            self.tried.set()
            while (line := self.lines.get()) is not None:
                tracker.log(*line)
                self.sent += 1
            tracker.close()
        # The network, a server or a disk fails in ways of its own.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self.failed = True
            if isinstance(error, OrchestratorError) and self.awaited:
                self.refusal = error
            elif not self.given_up:
                self.say(f"WARNING: {self.name} {what}: {str(error) or type(error).__name__}")
            self.tried.set()
