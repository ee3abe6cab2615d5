"""The code that a node with an empty disk is given."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.head.start.recovery.blueprint import Blueprint
from orchestrator.head.start.request import Request
from orchestrator.head.transfer.code import archive
from orchestrator.head.transfer.code.listing import Rules
from orchestrator.head.transfer.code.scan import Limits, Scan
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.spec import Target as SpecTarget
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from tests.head.start.recovery.test_gather import record

SPEC = Spec(
    job="run-1", node=0, nnodes=3, experiment="run", nproc=1, first_rank=0, start="plain",
    agent=("py",), env={}, unset=(), workdir="/", config={},
    target=SpecTarget(kind="script", name="train.py"),
)  # fmt: skip


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
    known = Blueprint(
        request, cast(Any, None), place, "run-1", 1, (), (), cast(Any, None), iter(()),
        scan=Scan(os.fsencode(work), Rules(everything=True), Limits()),
    )  # fmt: skip
    with known.code() as code:
        assert code.digest == tree.digest and Path(os.fsdecode(code.directory)).name == "work"
        assert Path(os.fsdecode(code.directory), "train.py").read_text() == "one"
    (place.path / archive.NAME).unlink()
    with pytest.raises(CheckFailed, match="holds other code by now") as refused, known.code():
        pass
    assert "sync.keep" in refused.value.fix
    place.write("manifest.json", json.dumps({"tree": None}))
    with (
        pytest.raises(CheckFailed, match="does not share the directory"),
        replace(known, scan=None).code(),
    ):
        pass
