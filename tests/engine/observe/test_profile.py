"""Profile: traces and a summary of the requested steps; a full disk does not stop a run."""

import gzip
import json
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.config.schema import ProfilingConfig
from orchestrator.engine.observe.profile import Profile
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.node.transfer.outputs import STAY_HIDDEN
from tests.engine import pair

pytestmark = pytest.mark.slow

WANTED = ProfilingConfig(enabled=True, wait=1, warmup=1, active=2)


def alone(rank: int = 0, world: int = 1) -> Ranks:
    return Ranks(rank, world, rank, torch.device("cpu"), ((0, "here"),) * world)


def work(size: int = 64) -> None:
    torch.randn(size, size).mm(torch.randn(size, size))


def run(
    profiling: ProfilingConfig, outputs: Path | None, steps: int, said: list[str], ranks: Ranks
) -> list[int]:
    """The steps after which there was a trace."""
    found = []
    with Profile(profiling, outputs, ranks, said.append) as profile:
        for step in range(1, steps + 1):
            work()
            profile.step()
            if outputs is not None and (outputs / "profile" / "rank_00.json.gz").exists():
                found.append(step)
    return found


def names(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_profile_of_one_rank_is_written(tmp_path: Path) -> None:
    said: list[str] = []
    assert run(WANTED, tmp_path, 6, said, alone()) == [4, 5, 6]
    directory = tmp_path / "profile"
    assert sorted(path.name for path in directory.iterdir()) == ["rank_00.json.gz"]
    traced = names(directory / "rank_00.json.gz")
    assert "aten::mm" in traced
    assert {name for name in traced if name.startswith("ProfilerStep")} == {
        "ProfilerStep#2",
        "ProfilerStep#3",
    }
    assert said == [f"profile of steps 3 to 4 in {directory}; `orchestrator profile` reads it"]


def test_partial_trace_has_temporary_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a node are fetched while the job runs, but not under temporary names."""
    export = torch.profiler.profile.export_chrome_trace
    written: list[str] = []

    def look(self: torch.profiler.profile, path: str) -> None:
        export(self, path)
        written.extend(found.name for found in (tmp_path / "profile").iterdir())

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", look)
    run(WANTED, tmp_path, 6, [], alone())
    assert written and all(map(STAY_HIDDEN.fullmatch, written)), written


def test_early_end_reports_missing_profile(tmp_path: Path) -> None:
    said: list[str] = []
    assert run(WANTED, tmp_path, 3, said, alone()) == []
    assert said == ["the run ended 1 steps before its profile was complete: no trace"]
    assert not list(tmp_path.iterdir())


def test_error_in_training_is_raised_unchanged(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), Profile(WANTED, tmp_path, alone(), said.append) as now:
        for _ in range(3):
            now.step()
        _ = 1 / 0
    assert not said and not list(tmp_path.iterdir())
    # And the next one can begin.
    assert run(WANTED, tmp_path, 4, said, alone()) == [4]


def test_unwritable_directory_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").touch()
    said: list[str] = []
    with Profile(WANTED, tmp_path, alone(), said.append) as profile:
        for _ in range(6):
            profile.step()
    assert "WARNING: no trace of rank 0" in capfd.readouterr().err
    assert said[-1].startswith("no rank could write a trace: rank 0: ")


def test_profile_by_hand_is_written_to_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(WANTED, None, 4, [], alone())
    assert (tmp_path / "profile" / "rank_00.json.gz").exists()


# -- two ranks ------------------------------------------------------------------------------------


def two_ranks(rank: int, directory: Path) -> None:
    """The disk of rank 1 is full; then that of rank 0."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for name, full in (("full 1", 1), ("full 0", 0)):
        said: list[str] = []
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with Profile(WANTED, directory / name, alone(rank, 2), said.append) as profile:
            for _ in range(5):
                work()
                dist.all_reduce(torch.ones(10))
                profile.step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        if rank == 0:
            (directory / f"{name} said").write_text("\n".join(said))


def test_full_disk_loses_one_trace(tmp_path: Path) -> None:
    results = pair.run(two_ranks, tmp_path)

    for full in (0, 1):
        directory = tmp_path / f"full {full}" / "profile"
        other = 1 - full
        assert f"WARNING: no trace of rank {full}" in results
        assert (directory / f"rank_{other:02d}.json.gz").exists()
        assert not (directory / f"rank_{full:02d}.json.gz").exists()
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
        said = (tmp_path / f"full {full} said").read_text()
        assert f"it lacks rank {full}: " in said


def test_profiler_is_imported_only_if_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An import of it fails from here on.
    monkeypatch.setitem(sys.modules, "torch.profiler", None)
    assert run(ProfilingConfig(), tmp_path, 1, [], alone()) == []
    with pytest.raises(ImportError):
        run(WANTED, tmp_path, 1, [], alone())
