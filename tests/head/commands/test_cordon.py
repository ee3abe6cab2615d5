"""What `orchestrator node list` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.records import cordons


def test_all_that_are_cordoned_or_those_of_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "login"))
    cordons.add(["10.0.0.1", "10.0.0.2"], "a bad fan")
    nodes = tmp_path / "my nodes.txt"
    nodes.write_text("10.0.0.2\n10.0.0.3\n")

    def shown(*words: str) -> list[str]:
        result = CliRunner().invoke(cli, ["node", "list", "--json", *words])
        assert result.exit_code == 0, result.output
        return [each["machine"] for each in json.loads(result.output)["cordoned"]]

    assert shown() == ["10.0.0.1", "10.0.0.2"]
    assert shown("--nodes", str(nodes)) == ["10.0.0.2"]
    nodes.write_text("10.0.0.3\n")
    result = CliRunner().invoke(cli, ["node", "list", "--nodes", str(nodes)])
    assert result.output.strip() == "no machine of the list is cordoned"
