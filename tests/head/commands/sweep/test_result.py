"""The metric of a sweep's member: a Trainer's, or one that a program has printed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.commands.sweep.sweep import last_value
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

NODE = NodeRecord(0, "a", "a", None, None, "10.0.0.1", "py", 0, 1, "ended")
DONE = JobRecord("try-1", "try", "done", ["x"], [NODE], 100.0, ended=130.0)
LOG = """step 1 loss 2.0 val_bpb: 1.5 xval_bpb: 9 val_bpb_best: 9
{"val_bpb": 0.75, "lr": 1e-4} 0val_bpb 9
VAL_BPB=1e0 | val_bpb: junk
"""


def job(tmp_path: Path, log: str = "", metrics: list[dict[str, Any]] | None = None) -> Experiment:
    experiment = experiments.create_experiment(tmp_path, "try")
    experiment.logs.mkdir(exist_ok=True)
    experiment.log(NODE).write_text(log)
    if metrics:
        outputs = experiment.path / "outputs"
        outputs.mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in metrics)
        (outputs / "rank_00_metrics.jsonl").write_text(text)
    return experiment


def test_last_value_reads_printed_numbers(tmp_path: Path) -> None:
    experiment = job(tmp_path, LOG)
    assert last_value(experiment, DONE, "val_bpb") == (1.0, "")
    # A slow pattern would need minutes for this line.
    experiment.log(NODE).write_text(f"acc{' ' * 60_000}\nacc: 4\n")
    assert last_value(experiment, DONE, "acc") == (4.0, "")


def test_last_value_prefers_trainer_metrics(tmp_path: Path) -> None:
    lines = [{"step": step, "time": 1.0, "loss": 1 / step} for step in (1, 2, 4)]
    experiment = job(tmp_path, "loss: 77", lines)
    assert last_value(experiment, DONE, "loss") == (0.25, "")
    wrong = "nothing measured or printed los; did you mean 'loss'?"
    assert last_value(experiment, DONE, "los") == (None, wrong)


@pytest.mark.parametrize("last", ["nan", "inf"])
def test_last_value_names_number_that_is_not_finite(tmp_path: Path, last: str) -> None:
    experiment = job(tmp_path, f"loss 1\nloss {last}\n")
    assert last_value(experiment, DONE, "loss") == (None, f"the last loss is {last}")


def test_last_value_ignores_log_that_is_no_plain_file(tmp_path: Path) -> None:
    log = job(tmp_path).log(NODE)
    log.unlink()
    os.mkfifo(log)
    nothing = (None, "nothing measured or printed loss")
    assert last_value(Experiment(log.parents[1]), DONE, "loss") == nothing
