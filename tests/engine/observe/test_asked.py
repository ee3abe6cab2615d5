"""Asked for a profile while it trains, all ranks trace the same steps and learn the same."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.follow.requests import ask_for_profile
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.requests import follow as profiling
from orchestrator.protocol.requests.follow import ProfileRequest, ProfileState
from orchestrator.traces import timeline
from orchestrator.traces.timeline import TraceEvent, events_that_matter, trace_of_rank
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

REQUEST_FILE = ProfileRequest(id="7", steps=2)
STEPS = 12


def job(directory: Path) -> Job:
    config: dict[str, Any] = {
        "model": {"num_layers": 1, "model_dim": 32, "num_heads": 2},
        "dataset": {"sequence_length": 16},
        "training": {"max_steps": STEPS, "gradient_accumulation": 2},
        "fsdp": {"sharding_strategy": "ddp"},
        "logging": {"interval": 1},
    }
    return Job(str(directory), [1, 1], config)


def asking(run_dir: RunDir, trace: ProfileRequest, states: list[ProfileState]) -> threading.Thread:
    """A head that asks again and again, from before the ranks are there to the end."""

    def go() -> None:
        while not states or states[-1].reply is None or states[-1].reply.state != profiling.WRITTEN:
            states.append(ask_for_profile(run_dir, trace))
            time.sleep(0.05)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    return thread


def traced(path: Path) -> tuple[dict[str, Any], list[TraceEvent]]:
    with timeline.open_trace(path) as trace:
        events = list(events_that_matter(trace.events()))
        return trace.about, events


def test_all_ranks_trace_requested_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    run_dir = RunDir("asked", 0)
    asked, plain = job(Path(run_dir.path)), job(tmp_path / "plain")
    asked.path.mkdir(parents=True)
    states = [ask_for_profile(run_dir, REQUEST_FILE)]
    assert states[0] == ProfileState()
    other = ask_for_profile(run_dir, REQUEST_FILE.replace(id="8"))
    assert other.busy and other.reply is None
    head = asking(run_dir, REQUEST_FILE, states)
    assert run(asked, plain) == [[0, 0], [0, 0]], asked.output()
    head.join()

    reply = states[-1].reply
    assert reply is not None and states[-1].stepped is not None
    assert (reply.last - reply.first, reply.text) == (REQUEST_FILE.steps - 1, "")
    directory = asked.experiment() / "outputs" / reply.directory
    assert directory.name == f"step_{reply.first:08d}"
    names = ["rank_00.json.gz", "rank_01.json.gz"]
    assert sorted(path.name for path in directory.iterdir()) == names
    for rank, name in enumerate(names):
        about, events = traced(directory / name)
        assert (about["rank"], about["first"], about["last"]) == (rank, reply.first, reply.last)
        found = trace_of_rank(events)
        assert found.steps == REQUEST_FILE.steps
        assert found.compute_ms > 0 and found.communication_ms > 0
        assert "orchestrator: optimizer" in {event.name for event in events}
    losses = [[line["loss"] for line in one.metrics()] for one in (asked, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert f"steps {reply.first} to {reply.last} are traced" in asked.output()
    # No second request was made, and a later one is not taken for this one.
    assert len(list(directory.parent.iterdir())) == 1
    assert not ask_for_profile(run_dir, REQUEST_FILE.replace(id="9")).busy
