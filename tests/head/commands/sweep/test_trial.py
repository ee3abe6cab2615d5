"""The number that `orchestrator try` prints: a Trainer's, or one that a program has printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.commands.sweep import trial
from orchestrator.head.follow import verdict
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

NODE = NodeRecord(0, "a", "a", None, None, "10.0.0.1", "py", 0, 1, "ended")
DONE = JobRecord("try-1", "try", "done", ["x"], [NODE], 100.0, ended=130.0)
LOG = """step 1 loss 2.0 val_bpb: 1.5 xval_bpb: 9 val_bpb_best: 9
{"val_bpb": 0.75, "lr": 1e-4} 0val_bpb 9
VAL_BPB=1e0 | val_bpb: junk
"""


def job(tmp_path: Path, log: str = "", metrics: list[dict[str, Any]] | None = None) -> Experiment:
    experiment = experiments.create(tmp_path, "try")
    experiment.logs.mkdir(exist_ok=True)
    experiment.log(NODE).write_text(log)
    if metrics:
        outputs = experiment.path / "outputs"
        outputs.mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in metrics)
        (outputs / "rank_00_metrics.jsonl").write_text(text)
    return experiment


def test_what_a_program_prints(tmp_path: Path) -> None:
    experiment = job(tmp_path, LOG)
    found = trial.result(experiment, DONE, "val_bpb")
    assert (found["value"], found["best"], found["seconds"], found["problem"]) == (
        1.0,
        0.75,
        30,
        "",
    )
    assert trial.result(experiment, DONE, "lr")["best"] is None  # neither way is better
    experiment.log(NODE).write_text("acc=3\nacc=2\n")
    assert trial.result(experiment, DONE, "acc")["best"] == 3.0
    experiment.log(NODE).write_text(f"acc{' ' * 60_000}\nacc: 4\n")  # not looked at for minutes
    assert trial.result(experiment, DONE, "acc")["value"] == 4.0


def test_what_a_trainer_measures_comes_first(tmp_path: Path) -> None:
    lines = [{"step": step, "time": 1.0, "loss": 1 / step} for step in (1, 2, 4)]
    experiment = job(tmp_path, "loss: 77", lines)
    found = trial.result(experiment, DONE, "loss")
    assert (found["value"], found["steps"]) == (0.25, 4)
    wrong = trial.result(experiment, DONE, "los")
    assert wrong["problem"] == "nothing measured or printed los; did you mean 'loss'?"
    assert wrong["value"] is None and wrong["steps"] == 4


@pytest.mark.parametrize("last", ["nan", "inf"])
def test_a_number_that_is_none_is_said(tmp_path: Path, last: str) -> None:
    found = trial.result(job(tmp_path, f"loss 1\nloss {last}\n"), DONE, "loss")
    assert found["value"] is None and found["best"] == 1.0
    assert found["problem"] == f"the last loss is {last}"
    json.dumps(found, allow_nan=False)


def test_how_it_ended(tmp_path: Path) -> None:
    experiment = job(tmp_path, "loss 1")
    over = verdict.stopped("its time limit of 5 min 00 s is over (--time-limit)", 1.0)
    stopped = replace(DONE, state="stopped", verdict=over)
    found = trial.result(experiment, stopped, "loss")
    assert (found["time_limit"], found["problem"], found["state"]) == (True, "", "stopped")
    killed = replace(stopped, verdict=verdict.stopped("stopped by the user", 1.0))
    found = trial.result(experiment, killed, "loss")
    assert not found["time_limit"] and found["problem"] == "it was stopped: stopped by the user"
