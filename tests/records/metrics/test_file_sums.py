"""Files that grow are read once, into bounded sums that do not depend on the pieces."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.records.metrics import curves, trainers
from orchestrator.records.metrics.curves import Cache, FileSums, measured
from orchestrator.views.report import story
from tests.views.report.stories import experiment, line


def append(path: Path, steps: Sequence[int]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "x": step % 7}) + "\n" for step in steps)


def read(path: Path, columns: int = 16, places: int = 0) -> FileSums:
    found = FileSums(path, measured, columns, places)
    found.read()
    return found


def points(found: FileSums) -> Any:
    known = found.metrics["x"]
    means = known.means(known.base, known.base + len(known.counts))
    return found.shift, known.base, known.steps, known.lows, known.highs, means


@given(st.lists(st.lists(st.integers(0, 3000), min_size=1), min_size=1, max_size=5))
def test_pieces_are_the_same_as_the_whole(pieces: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "metrics"
        path.touch()
        grown = read(path)
        for steps in pieces:
            append(path, steps)
            grown.read()
        assert points(grown) == points(read(path))
        known = grown.metrics["x"]
        every = [step for steps in pieces for step in steps]
        assert sum(known.counts) == len(every) and len(known.counts) <= 16
        assert sum(known.totals) == sum(step % 7 for step in every)
        assert max(known.steps) == max(every)


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    path = tmp_path / "metrics"
    append(path, range(1000))
    found = FileSums(path, lambda line: told.append(1) or measured(line), 16)  # type: ignore[func-returns-value]
    found.read()
    assert len(told) == 1000
    append(path, [1000, 1001])
    found.read()
    found.read()
    assert len(told) == 1002


@pytest.mark.parametrize("places", [0, 64], ids=["read whole", "sampled"])
def test_a_run_that_goes_back_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(curves, "WHOLE_BYTES", 1000)
    path = tmp_path / "metrics"
    append(path, range(2000))
    found = read(path, places=places)
    assert found.steps is not None and found.steps[1] >= 1900
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:500]))  # cut by the engine, which goes on from step 499
    append(path, [500, 501])
    found.read()
    assert found.steps[1] < 600 and found.replaced == 1
    fresh = read(path, places=places)
    assert points(found) == points(fresh)
    path.unlink()
    append(path, range(5000, 9000))  # another run, longer than the one before
    found.read()
    assert found.steps[0] >= 4096 and found.replaced == 2


def test_a_large_file_is_sampled_and_then_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "WHOLE_BYTES", 1000)
    path = tmp_path / "metrics"
    append(path, range(20_000))
    found = read(path, columns=16, places=64)
    assert sum(found.metrics["x"].counts) == 64 and len(found.metrics["x"].counts) >= 8
    append(path, [20_000, 20_001])
    found.read()
    assert sum(found.metrics["x"].counts) == 66


def test_those_that_nobody_looked_at_for_long_are_forgotten(tmp_path: Path) -> None:
    kept = Cache(most=40 * 40)
    for name in "abcabda":
        path = tmp_path / name
        append(path, range(100))
        kept.read(path, "x", measured, 16)
        kept.make_room()
    assert [path.name for path, *_ in kept.sums] == ["b", "d", "a"][-len(kept.sums) :]
    assert 1 <= len(kept.sums) <= 3
    assert sum(each.size for each in kept.sums.values()) <= 40 * 40


def test_a_file_that_may_not_be_read_or_is_gone_is_empty(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("none", "link"):
        assert read(tmp_path / name).metrics == {}


def test_two_pages_may_show_the_same_experiment(tmp_path: Path) -> None:
    """In threads, while it grows, so that the columns of one change under the other."""
    made = experiment(tmp_path / "run", ranks=8, steps=5)
    over = threading.Event()

    def look(others: int) -> None:
        while not over.is_set():
            told = story.read_story(made, others).trainings[0]
            assert told.maps["step_ms"].ranks == list(range(8))

    with ThreadPoolExecutor() as threads:
        pages = [threads.submit(look, others) for others in (0, 1, 1)]
        for upto in (300, 700, 1500, 3000):
            for rank in range(8):
                with (made.path / "outputs" / trainers.file_name(rank)).open("a") as file:
                    steps = range(upto // 2, upto)
                    file.writelines(json.dumps(line(rank, step, 2)) + "\n" for step in steps)
        over.set()
    assert [page.result() for page in pages] == [None] * 3
    assert story.read_story(made).trainings[0].curves["loss"].steps[-1] == 2999
