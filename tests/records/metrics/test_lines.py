"""A file that grows is read line by line, each line once."""

import json
from pathlib import Path

import pytest

from orchestrator.records.metrics.lines import GrowingFile


def test_growing_file_yields_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    added = GrowingFile(path)
    assert added.read() == []
    path.write_bytes(b'{"a": 1}\nnonsense\n{"a": 2}\n{"a"')
    assert added.read() == [{"a": 1}, {"a": 2}]
    assert added.read() == []
    with path.open("ab") as file:
        file.write(b": 3}\n")
    assert added.read() == [{"a": 3}]
    # The file is replaced.
    path.write_text(json.dumps({"a": 4}) + "\n")
    assert added.read() == [{"a": 4}]


@pytest.mark.parametrize("odd", ["nonsense", '{"b": 2}, {"c": 3}', "5", '{"b": [1', "[" * 10**5])
def test_invalid_line_hides_no_other(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "lines"
    path.write_text(f'{{"a": 1}}\n{odd}\n\n{{"a": 2}}\n2]}}\n{{"a": 3}}\n')
    assert GrowingFile(path).read() == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize("more", [0, 1, 50])
def test_truncated_file_is_read_from_beginning(tmp_path: Path, more: int) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    added = GrowingFile(path)
    assert len(added.read()) == 2
    path.write_bytes(b'{"a": 1}\n{"a": 3}\n' + b'{"a": 4}\n' * more)
    kept = GrowingFile(path, added.at, mark=added.mark)
    for each in (added, kept):
        assert [line["a"] for line in each.read()] == [1, 3] + [4] * more
        assert each.read() == []
