"""The choice of code for the nodes. Its use there: end_to_end/test_code.py."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.start.code import begin_scan, refuse_strange, tree_for
from orchestrator.head.start.request import resolve_request
from orchestrator.head.transfer.listing import Rules
from orchestrator.head.transfer.scan import Scan


def test_function_travels_alone_from_too_large_directory(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(2_000_000))
    scan = Scan(os.fsencode(tmp_path), Rules(largest_tree=1.0))
    script: Any = SimpleNamespace(payload=None, directory=tmp_path)
    with pytest.raises(CheckFailed, match="more than 1 MB does not travel"):
        tree_for(script, scan)
    function: Any = SimpleNamespace(payload=tmp_path, directory=tmp_path)
    tree = tree_for(function, scan)
    assert tree.files == 0 and tree.digest
    (note,) = tree.notes
    assert note.startswith("warning: the function goes without its directory: ")


@pytest.mark.parametrize("place", ["home", "/"])
def test_function_does_not_take_home_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "letter.txt").touch()
    home = tmp_path if place == "home" else Path(place)
    function: Any = SimpleNamespace(payload=tmp_path, directory=home)
    tree = tree_for(function, Scan(os.fsencode(tmp_path), Rules()))
    assert tree.files == 0
    assert f"{home} holds more of yours than code" in tree.notes[0]


@pytest.mark.parametrize("include", [(), ("conf", "v*")])
def test_secret_files_never_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, include: tuple[str, ...]
) -> None:
    """Secret files are not sent by their own name or a link's name, under any include patterns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    (tmp_path / "conf").mkdir()
    for name in ("train.py", "variables", "conf/real"):
        (tmp_path / name).write_text("HF_TOKEN=abc")
    (tmp_path / "linked").symlink_to("conf/real")
    request = resolve_request(
        LaunchArguments(
            program=("train.py",),
            env_file=("variables", str(tmp_path / "linked")),
            overrides=(f"sync.include=[{','.join(include)}]",),
        )
    )
    paths = {entry.path for entry in begin_scan(request).tree().entries if entry.value}
    assert paths == {b"train.py"}


def test_install_that_snapshot_cannot_replace_is_refused() -> None:
    """Its package and its nodes are named, with the command that removes it."""
    nodes: Any = [SimpleNamespace(node=SimpleNamespace(name=name)) for name in "abc"]
    strange: Any = [SimpleNamespace(strange=names) for names in ((), ("mine",), ("mine", "more"))]
    refuse_strange(nodes[:1], strange[:1], "/proj")
    with pytest.raises(CheckFailed, match="Python of b, c imports mine, more from its") as refusal:
        refuse_strange(nodes, strange, "/proj")
    assert "pip uninstall -y mine;" in refusal.value.fix
