"""The code that a node with an empty disk is given."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.parts import Prepared
from orchestrator.head.start.recovery.spares import Parts
from orchestrator.head.start.request import Request
from orchestrator.head.transfer.code import archive
from orchestrator.head.transfer.code.listing import Rules
from orchestrator.head.transfer.code.scan import Limits, Scan
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from tests.head.start.recovery.test_gather import record


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "login"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    experiment = experiments.create(tmp_path / "experiments", "run")
    experiment.write_signed(record("abc"))
    return experiment


def test_the_code_is_that_of_the_launch_or_none(place: Experiment, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("one")
    tree = Scan(os.fsencode(work), Rules(everything=True), Limits()).tree()
    place.write("manifest.json", json.dumps({"tree": tree.digest}))
    archive.write(tree, place.path / archive.NAME)
    (work / "train.py").write_text("another")
    request = cast(Request, SimpleNamespace(directory=work, payload=None))
    scan = Scan(os.fsencode(work), Rules(everything=True), Limits())
    nodes = cast(Nodes, SimpleNamespace(scan=scan))
    plan = cast(Any, SimpleNamespace(nodes=()))
    parts = Parts(Prepared(request, nodes, place, plan))
    with parts.code_of_job(request) as code:
        assert code.digest == tree.digest and Path(os.fsdecode(code.directory)).name == "work"
        assert Path(os.fsdecode(code.directory), "train.py").read_text() == "one"
    (place.path / archive.NAME).unlink()
    holds_other = pytest.raises(CheckFailed, match="holds other code by now")
    with holds_other as refused, parts.code_of_job(request):
        pass
    assert "sync.keep" in refused.value.fix
    place.write("manifest.json", json.dumps({"tree": None}))
    without = cast(Nodes, SimpleNamespace(scan=None))
    with (
        pytest.raises(CheckFailed, match="does not share the directory"),
        Parts(Prepared(request, without, place, plan)).code_of_job(request),
    ):
        pass
