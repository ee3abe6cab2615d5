"""Metrics files of any length and content become a bounded number of points."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.records.metrics import curves, lines
from orchestrator.records.metrics.curves import Curve, FileSums
from tests.records.metrics.test_points import write


def test_few_lines_are_kept_as_points(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *[{"step": step, "loss": 2.0 / step} for step in (1, 5, 10)])
    curve = curves.rank_curves(path, 100)["loss"]
    assert curve.steps == [1, 5, 10]
    assert curve.means == curve.lows == curve.highs == [2.0, 0.4, 0.2]


def test_many_lines_keep_range_per_point(tmp_path: Path) -> None:
    losses = [1.0] * 10_000
    # A spike of one step must not get lost.
    losses[4_321] = 99.0
    told = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    curve = curves.rank_curves(write(tmp_path / "m", *told), 100)["loss"]
    assert 50 < len(curve.steps) <= 100
    assert (max(curve.highs), min(curve.lows)) == (99.0, 1.0)
    at = curve.highs.index(99.0)
    assert curve.steps[at] - 128 < 4_321 <= curve.steps[at]
    assert curve.steps[-1] == 9_999
    assert curve.means[at] == pytest.approx(1 + 98 / 128)


def test_invalid_lines_and_values_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(
        b'{"step": 1, "loss": null, "ok": true, "name": "x", "lr": 0.5}\n'
        b'{"step": "2", "lr": 1}\n[1]\n{"lr": 3}\nnull\n\xff\xfe\n'
        b'{"step": 3, "lr": NaN, "loss": 1e999}\n{"step": 4, "lr": 0.25}\n{"step": 5, "lr"'
    )
    assert curves.rank_curves(path, 10).keys() == {"lr"}
    assert curves.rank_curves(path, 10)["lr"].steps == [1, 4]


def test_number_of_names_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "m", *[{"step": 1, **{f"m{i}": i for i in range(500)}}])
    assert len(curves.rank_curves(path, 10)) == curves.MOST_NAMES


def test_long_names_are_cut_and_stay_distinct(tmp_path: Path) -> None:
    first, second = "x" * 5000 + "/a", "x" * 5000 + "/b"
    path = write(tmp_path / "m", *[{"step": step, first: 1.0, second: 2.0} for step in (1, 2)])
    found = curves.rank_curves(path, 10)
    assert [len(name) for name in found] == [100, 100]
    assert [(name[-2:], curve.means) for name, curve in found.items()] == [
        *(("/a", [1.0, 1.0]), ("/b", [2.0, 2.0])),
    ]


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_curves_survive_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("any") / "rank_00_metrics.jsonl"
    path.write_bytes(b"\n".join([*parts, b'{"step": 7, "x": 1}\n']))
    found = curves.rank_curves(path, 10)
    assert found["x"].means == [1.0]


# -- files that grow ------------------------------------------------------------------------------


def append(path: Path, steps: Sequence[int]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "x": step % 7}) + "\n" for step in steps)


def read(sums: FileSums) -> Curve:
    sums.read()
    return sums.curves(16).get("x", Curve())


@given(st.lists(st.lists(st.integers(0, 3000), min_size=1), min_size=1, max_size=5))
def test_incremental_read_equals_whole_read(pieces: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "metrics"
        grown = FileSums(path, 16)
        for steps in pieces:
            append(path, steps)
            found = read(grown)
        assert found == read(FileSums(path, 16))
        assert len(found.steps) <= 16 and found.steps[-1] == max(map(max, pieces))
        assert max(found.highs) == max(step % 7 for steps in pieces for step in steps)


def test_truncated_or_replaced_file_is_reread(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    append(path, range(2000))
    grown = FileSums(path, 16)
    assert read(grown).steps[-1] == 1999
    kept = path.read_text().splitlines(keepends=True)[:500]
    path.write_text("".join(kept))  # cut by the engine, which goes on from step 499
    append(path, [500, 501])
    assert read(grown) == read(FileSums(path, 16))
    assert grown.replaced == 1
    path.unlink()
    # Another run, longer than the one before.
    append(path, range(5000, 9000))
    assert read(grown).steps[0] > 5000 and grown.replaced == 2


def test_unreadable_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("none", "link"):
        assert read(FileSums(tmp_path / name)) == Curve()
        assert list(lines.sampled_lines(tmp_path / name, 8)) == []
