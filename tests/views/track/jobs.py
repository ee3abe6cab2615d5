"""Experiments of one node, as they lie on disk."""

import json
from pathlib import Path

from orchestrator.protocol.message import decode_value, encode_value
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.experiments import create_experiment

NOW = 1_700_000_000.0


def job(root: Path, name: str, **more: object) -> Experiment:
    made = create_experiment(root, name)
    nodes = [NodeRecord(0, "a", "a", None, None, "10.0.0.1", "python", 0, 1)]
    record = JobRecord("0123456789abcdef", made.name, "running", ["x"], nodes, NOW - 60)
    made.write_record(decode_value(JobRecord, {**encode_value(record), "launch": {}, **more}))
    return made


def tell(made: Experiment, name: str, *lines: dict[str, object]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (made.path / "outputs" / name).write_text(text)
