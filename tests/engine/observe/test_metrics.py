"""Metrics: a planted straggler is found in exposed communication, files survive what disks do."""

import json
import math
import resource
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from orchestrator.config.schema import Config, DatasetConfig, ModelConfig
from orchestrator.engine.core.parts import Parts
from orchestrator.engine.models.losses import Loss, Losses
from orchestrator.engine.observe.metrics import Estimate, MetricsFile, memory_bytes, progress_line
from orchestrator.engine.observe.phases import Phases
from tests.engine import pair

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
# These seconds are far longer than any other part of a step.
NAP = 1.0

# -- phases ---------------------------------------------------------------------------------------


class Sleepy(nn.Module):
    """Two layers; rank 1 sleeps in its forward pass, as if its machine were slow."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.nap = NAP * rank

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.nap)
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.square().mean()


def measure(model: nn.Module, steps: int = 2) -> dict[str, float | None]:
    phases = Phases(CPU, model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps + 1):
        if step == 1:
            # The set-up of the first step is excluded.
            phases.flush(1)
        with phases("data"):
            time.sleep(0.02)
            inputs = torch.randn(4, 8)
        with phases("forward_backward"):
            phases.backward(model(inputs))
        with phases("optimizer"):
            sgd.step()
            sgd.zero_grad()
    return phases.flush(steps)


def ways(rank: int) -> dict[str, nn.Module]:
    """The ways to spread a model, and one that is not spread although there are two ranks."""
    found: dict[str, nn.Module] = {}
    model = Sleepy(rank)
    for layer in model.layers:
        fully_shard(layer)
    found["full"] = fully_shard(model)
    found["ddp"] = DistributedDataParallel(Sleepy(rank))
    found["alone"] = Sleepy(0)
    return found


def slow_rank(rank: int, directory: Path) -> None:
    for name, model in ways(rank).items():
        found = measure(model, steps=1)
        (directory / f"{name} {rank}").write_text(json.dumps(found))


def test_waiting_for_slow_rank_is_exposed_communication(tmp_path: Path) -> None:
    pair.run(slow_rank, tmp_path)

    def found(name: str, rank: int) -> dict[str, Any]:
        return json.loads((tmp_path / f"{name} {rank}").read_text())

    fast, slow = found("ddp", 0), found("ddp", 1)
    assert fast["exposed_comm_ms"] > slow["exposed_comm_ms"]
    assert slow["forward_backward_ms"] > max(fast["forward_backward_ms"], 1000 * NAP)
    assert all(rank["data_ms"] > 15 and rank["optimizer_ms"] > 0 for rank in (fast, slow))
    # Where these wait is not known.
    for way in ("full", "alone"):
        assert found(way, 0)["exposed_comm_ms"] is None
        assert found(way, 1)["forward_backward_ms"] > 0


def test_one_process_has_no_exposed_communication() -> None:
    found = measure(Sleepy(0))
    assert found["exposed_comm_ms"] == 0
    assert found["data_ms"] is not None and found["data_ms"] > 15


def test_inner_phase_is_subtracted_from_outer() -> None:
    phases = Phases(CPU, nn.Linear(1, 1))
    with pytest.raises(ValueError), phases("optimizer"):
        with phases("exposed_comm"):
            time.sleep(0.5)
        raise ValueError
    found = phases.flush(1)
    assert found["exposed_comm_ms"] is not None and found["exposed_comm_ms"] > 450
    assert found["optimizer_ms"] is not None and 0 <= found["optimizer_ms"] < 450
    assert set(phases.flush(1).values()) == {0.0}


# -- phases on a GPU: the order of events, with streams and events that only count ----------------


class Stream:
    """One millisecond passes with every event that is recorded."""

    now = 0.0


class Event:
    recorded = 0
    at = math.nan

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        stream.now += 1
        self.at = stream.now
        Event.recorded += 1

    def elapsed_time(self, later: "Event") -> float:
        return later.at - self.at

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert not math.isnan(self.at)


def test_gpu_phases_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = Phases(torch.device("cuda", 0), nn.Linear(1, 1))
    with phases("forward_backward"):
        with phases("exposed_comm"):
            compute.now += 10
        compute.now += 100
    with phases("optimizer"):
        compute.now += 10
    found = phases.flush(1)
    assert found == {
        "data_ms": 0,
        # This is 100 ms and the records of two events.
        "forward_backward_ms": 102,
        "exposed_comm_ms": 11,
        "optimizer_ms": 11,
    }
    # Events come back: a long time between two flushes takes no more than a thousand or so.
    for _ in range(3000):
        with phases("data"):
            pass
    assert len(phases._done) <= 1001 and len(phases._clock._spare) <= 2004  # type: ignore[union-attr]
    assert phases.flush(3000)["data_ms"] == 1


# -- memory ---------------------------------------------------------------------------------------


def test_memory_of_process_is_measured() -> None:
    before, _ = memory_bytes(CPU)
    block = torch.ones(16 << 20)  # 64 MiB
    now, most = memory_bytes(CPU)
    assert now - before > 48 << 20
    assert most >= now
    assert block.numel()


# -- the file -------------------------------------------------------------------------------------


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_EXPERIMENT", str(tmp_path / "experiment"))
    return tmp_path / "experiment" / "outputs"


def steps_of(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_metrics_file_starts_new_or_continues_after_resume(outputs: Path) -> None:
    file = outputs / "rank_03_metrics.jsonl"

    def run(steps: range, after: int = 0) -> list[int]:
        with closing(MetricsFile(3, after)) as metrics:
            for step in steps:
                metrics.write({"step": step, "loss": 1.5})
        return steps_of(file)

    assert run(range(1, 8)) == [1, 2, 3, 4, 5, 6, 7]
    with file.open("a") as end:
        # The rank was killed here.
        end.write('{"step": 8, "lo')
    assert run(range(6, 9), after=5) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run(range(21, 22), after=20) == [*range(1, 9), 21]
    assert run(range(1, 3)) == [1, 2]
    file.unlink()
    assert run(range(6, 8), after=5) == [6, 7], "from the checkpoint of another experiment"
    assert [path.name for path in outputs.iterdir()] == [file.name]


def test_metrics_line_is_flushed_valid_json(outputs: Path) -> None:
    with closing(MetricsFile(0)) as metrics:
        metrics.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "mfu": None, "lr": 0.1})
        (line,) = (outputs / "rank_00_metrics.jsonl").read_text().splitlines()
    expected = {"step": 1, "loss": None, "grad_norm": None, "mfu": None, "lr": 0.1}
    found = json.loads(line, parse_constant=pytest.fail)
    assert time.time() - 600 < found.pop("time") < time.time() + 1
    assert found == {"rank": 0, **expected}


def test_metrics_need_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHESTRATOR_EXPERIMENT", raising=False)
    monkeypatch.chdir(tmp_path)
    with closing(MetricsFile(0)) as metrics:
        metrics.write({"step": 1})
    assert not list(tmp_path.iterdir())


def test_unwritable_directory_is_reported_once(
    outputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outputs.parent.touch()
    with closing(MetricsFile(7)) as metrics:
        metrics.write({"step": 1})
        metrics.write({"step": 2})
    error = capfd.readouterr().err
    assert error.count("WARNING: metrics of rank 7 are lost") == 1
    assert "Not a directory" in error


def test_metrics_file_is_opened_later_if_it_could_not(outputs: Path) -> None:
    """With what an attempt before it had written up to its checkpoint."""
    file, aside = outputs / "rank_00_metrics.jsonl", outputs.with_name("aside")
    outputs.mkdir(parents=True)
    file.write_text('{"step": 1}\n{"step": 2}\n')
    outputs.rename(aside)
    outputs.touch()
    with closing(MetricsFile(0, after=1)) as metrics:
        outputs.unlink()
        aside.rename(outputs)
        metrics.write({"step": 3})
        assert steps_of(file) == [1, 3]


def test_full_disk_loses_whole_lines_alone(
    outputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files is refused in the same two ways: a part of a line, then none."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with closing(MetricsFile(0)) as metrics:
            resource.setrlimit(resource.RLIMIT_FSIZE, (210, kept[1]))
            for step in range(1, 20):
                # Each line has about 60 bytes.
                metrics.write({"step": step, "loss": 1.0})
            assert steps_of(outputs / "rank_00_metrics.jsonl") == [1, 2, 3]
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
            metrics.write({"step": 20})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, ignored)
    assert steps_of(outputs / "rank_00_metrics.jsonl") == [1, 2, 3, 20]
    assert capfd.readouterr().err.count("WARNING") == 1


# -- the line on screen ---------------------------------------------------------------------------


def test_estimate_skips_first_step_and_spreads_pauses() -> None:
    now = 0.0
    estimate = Estimate(clock=lambda: now)
    now = 60.0  # compilation
    assert estimate.step() == 60
    assert estimate.seconds(109) is None
    for _ in range(2, 11):
        now += 2
        assert estimate.step() == pytest.approx(2)
        with estimate.pause():
            now += 4
            # The end of an epoch includes a checkpoint.
            with estimate.pause():
                now += 2
    assert estimate.seconds(100) == pytest.approx(100 * (2 + 6))
    # Steps became faster, and only the last 50 count.
    for _ in range(11, 61):
        now += 1
        assert estimate.step() == pytest.approx(1)
    assert estimate.seconds(50) == pytest.approx(50 * (18 + 54 + 50) / (18 + 50))
    assert estimate.seconds(None) is None


RECORD: dict[str, float | None] = {
    "step": 7,
    "loss": 2.34567,
    "lr": 3e-4,
    "grad_norm": 0.5,
    "tokens_per_s": 12345.6,
    "step_ms": 123.4,
    "mfu": None,
    "mfu_measured": None,
    "skipped_steps": 0,
}


def test_progress_line_is_formatted() -> None:
    assert progress_line(RECORD, 1000, 3725.0) == (
        "step    7/1000  loss 2.3457  grad 0.5  12,346 tokens/s  123.4 ms/step  1 h 02 min left"
    )
    known = {**RECORD, "loss": None, "mfu": 0.4567, "mfu_measured": 0.6, "skipped_steps": 3}
    assert progress_line(known, None, None, unit="targets", metrics={"correct": 0.25}) == (
        "step      7  loss -  correct 0.25  grad 0.5  12,346 targets/s  123.4 ms/step  mfu 45.7%"
        "  3 skipped"
    )


def unit(config: Config, losses: Loss) -> str:
    nothing: Any = None
    return Parts(config, nothing, nothing, nothing, nothing, losses, nothing).unit


def test_speed_unit_follows_loss() -> None:
    text, ranking = (
        Config(),
        Config(model=ModelConfig(kind="ranking"), dataset=DatasetConfig(kind="synthetic")),
    )
    sums: Loss = lambda *_: {}  # noqa: E731
    assert [unit(config, sums) for config in (text, ranking)] == ["tokens", "samples"]
    own = [Losses(loss, None, {}) for loss in (nn.MSELoss(), nn.CrossEntropyLoss())]
    assert [unit(text, losses) for losses in own] == ["samples", "targets"]
