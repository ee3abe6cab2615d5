"""What a head that did not launch a job finds out of it. How it uses that: test_restart.py."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.head.plan.model import Target
from orchestrator.head.start.recovery import blueprint
from orchestrator.head.start.recovery.blueprint import Blueprint, restored
from orchestrator.head.start.request import Request
from orchestrator.head.start.variables import hook
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


def test_who_cannot_say_how_a_job_was_launched_says_what_is_lacking(
    place: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_there(*_: object) -> None:
        raise NodeError("cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(blueprint, "for_now", not_there)
        with pytest.raises(NodeError, match=r"no node .* no record has: a: cannot be reached; b: "):
            restored(place, cast(Any, None))
    monkeypatch.setattr(blueprint, "part_of_another", lambda *_: SPEC)
    for words in ("{}", '{"directory": "/", "nodes": [{"reasons": {}}], "tree": 1, "rerun_of": 0}'):
        place.write("manifest.json", words)
        with pytest.raises(CheckFailed, match="does not say how it was launched") as refused:
            restored(place, cast(Any, None))
        assert refused.value.fix == f"orchestrator rerun {place.name}"
    function = SPEC.replace(target=SpecTarget(kind="engine", name=blueprint.CALL))
    monkeypatch.setattr(blueprint, "part_of_another", lambda *_: function)
    with pytest.raises(CheckFailed, match="keeps the nodes that it had"):
        restored(place, cast(Any, None))
    (place.path / "manifest.json").chmod(0o666)
    with pytest.raises(CheckFailed, match=r"manifest.json may be written by everybody"):
        restored(place, cast(Any, None))


def test_the_request_is_that_of_the_launch_with_its_secrets(place: Experiment) -> None:
    spec = SPEC.replace(
        env={"KEY": "abc", "A": "1", "NODE_RANK": "2"},
        secrets=("KEY",),
        target=SpecTarget(kind="script", name="train.py", args=("-x",)),
        config={"env": {"B": "2"}, "launch": {"nproc": 1}},
    )
    reasons = {"KEY": "--env-file keys", "A": "--env", "NODE_RANK": "identifies the node"}
    manifest = {
        "directory": "/data", "tree": "0", "rerun_of": None, "code": None, "hook": "",
        "nodes": [{"reasons": reasons}],
    }  # fmt: skip
    request = blueprint.request_of(place, record("abc"), manifest, spec)
    values = [(one.name, one.value, one.secret, one.why) for one in request.env]
    assert values == [("KEY", "abc", True, "--env-file keys"), ("A", "1", False, "--env")]
    assert request.target == Target("script", "train.py", ("-x",))
    assert request.config.env == {"B": "2"} and request.config.launch.nproc == 1
    assert request.secret_files == (Path("/data/keys"),) and request.directory == Path("/data")
    not_sent = blueprint.request_of(place, record("abc"), {**manifest, "tree": None}, spec)
    assert not_sent.target.kind == "auto"


def test_a_hook_is_taken_if_it_is_still_that_of_the_launch(tmp_path: Path) -> None:
    (tmp_path / "hook.sh").write_text("export A=1")
    manifest = {"hook": hook.digest("export A=1")}
    assert blueprint.hook_of("hook.sh", tmp_path, manifest) == "export A=1"
    assert not blueprint.hook_of("gone.sh", tmp_path, {"hook": ""})
    (tmp_path / "hook.sh").write_text("export A=2")
    with pytest.raises(CheckFailed, match=r"hook.sh is not what it was at the launch"):
        blueprint.hook_of("hook.sh", tmp_path, manifest)
