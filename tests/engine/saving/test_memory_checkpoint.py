"""orchestrator.memory_checkpoint: a script's own loop goes on from memory after its ranks died."""

from __future__ import annotations

import os
import random
import re
import runpy
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import orchestrator
from orchestrator.common.errors import OrchestratorError, UsageError
from orchestrator.engine.saving import memory
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "scripts/examples/memory_checkpoint_example.py"
MODULE = "tests.engine.saving.test_memory_checkpoint"


def example(directory: Path) -> None:
    """Run the example; rank 1 is killed right after the state of step 60, if KILLED is set."""
    keep = orchestrator.memory_checkpoint

    def keep_and_die(state: dict[str, Any], **how: bool) -> None:
        keep(state, **how)
        if state["step"] == 60 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("KILLED"):
        vars(orchestrator)["memory_checkpoint"] = keep_and_die
    runpy.run_path(str(EXAMPLE))


def test_the_example_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    memory, call = str(tmp_path / "memory"), f"{MODULE}:example"
    whole = Job(str(tmp_path / "whole"), [1, 1], {}, call=call)
    killed = Job(
        str(tmp_path / "killed"), [1, 1], {}, memory=memory, env={"KILLED": "1"}, call=call
    )
    again = Job(str(tmp_path / "again"), [1, 1], {}, memory=memory, call=call)
    codes = run(whole, killed, again)
    assert codes[0] == codes[2] == [0, 0], again.output()
    assert codes[1][1] == -9
    assert whole.output().count("no state is kept in memory: ORCHESTRATOR_RESUME_DIR is not") == 1
    step = re.search(r"resuming after step (\d+), from memory", again.output())
    assert step is not None
    assert int(step[1]) in (59, 60)
    lines = [line for line in whole.output().splitlines() if line.startswith("step ")]
    assert lines[1:] == [line for line in again.output().splitlines() if line.startswith("step ")]


def test_a_state_that_all_ranks_have_serves_any_number_of_them(tmp_path: Path) -> None:
    """Each node has it once; a node that is new takes it from another one."""
    memory, call = str(tmp_path / "memory"), f"{MODULE}:example"
    first = Job(str(tmp_path / "first"), [2, 2], {}, memory=memory, env={"KILLED": "1"}, call=call)
    assert run(first)[0][1] == -9
    for node in (0, 1):
        states = first.memory_of(node).glob("script/step_*")
        assert {path.name for path in next(states).iterdir()} >= {".metadata", "__0_0.distcp"}
    for name, nodes in (("fewer", [1]), ("more", [1, 1, 1])):
        shutil.copytree(memory, tmp_path / f"memory of {name}")
        again = Job(
            str(tmp_path / name), nodes, {}, memory=str(tmp_path / f"memory of {name}"), call=call
        )
        assert run(again) == [[0] * len(nodes)], again.output()
        assert re.search(r"resuming after step (59|60), from memory", again.output())


def test_both_calls_say_whether_all_ranks_have_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_OPEN", {})
    monkeypatch.delenv("ORCHESTRATOR_RESUME_DIR", raising=False)
    assert orchestrator.load_memory_checkpoint() is None
    with pytest.raises(UsageError, match="differ in whether all ranks have the same state"):
        orchestrator.memory_checkpoint({}, replicated=True)


def of_every_kind() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {k: v for k, v in scheduler.state_dict().items() if not callable(v)},
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "plain": [1, 2.5, "text", None, True, b"bytes", float("inf"), np.float64(0.1), (), {}],
        "empty": torch.empty(0, 2, dtype=torch.bfloat16),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        kind = tuple if isinstance(one, tuple) else list
        return type(other) is kind and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_what_scripts_save_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, without a process group; a second process would find the same."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("ORCHESTRATOR_RESUME_DIR", str(tmp_path))
    state = of_every_kind()
    for number in range(3):
        memory._OPEN.clear()  # as a new process would
        found = orchestrator.load_memory_checkpoint()
        assert (found is None) == (number == 0)
        assert found is None or same(state, found)
        state["step"] = number
        orchestrator.memory_checkpoint(state)
        opened = memory._opened(replicated=False)
        assert opened is not None
        opened.store.end()
    assert "resuming after step 2, from memory" in capsys.readouterr().out
    assert found is not None
    memory._OPEN.clear()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            torch.eye(2).to_sparse(),
            "state['x'] is a Tensor (torch.sparse_coo), which cannot be kept",
        ),
        (lambda: 0, "state['x'] is a function, which cannot be kept"),
        ([frozenset()], "state['x'][0] is a frozenset, which cannot be kept"),
        ((np.zeros(2),), "state['x'][0] is a ndarray, which cannot be kept"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as error:
        memory.encoded({"x": value}, {}, "state")
    assert error.value.fix


def test_ranks_without_a_process_group_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OrchestratorError, match=r"no process group yet\n.*comes first"):
        orchestrator.memory_checkpoint({})
