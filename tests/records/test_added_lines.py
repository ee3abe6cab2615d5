"""A file that grows is read line by line, each line once."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.records.added_lines import AddedLines


def test_a_file_that_grows_gives_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    added = AddedLines(path)
    assert added.read() == []
    path.write_bytes(b'{"a": 1}\nnonsense\n{"a": 2}\n{"a"')
    assert added.read() == [{"a": 1}, {"a": 2}]
    assert added.read() == []
    with path.open("ab") as file:
        file.write(b": 3}\n")
    assert added.read() == [{"a": 3}]
    path.write_text(json.dumps({"a": 4}) + "\n")  # written anew
    assert added.read() == [{"a": 4}]
