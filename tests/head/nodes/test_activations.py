"""A login's notes about machines are believed only if other users cannot write them."""

import stat
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.nodes import activations
from orchestrator.head.nodes.node_list import parse_nodes


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    return tmp_path / activations.NAME


def test_activations_are_stored_per_machine(kept: Path) -> None:
    assert activations.read_activations() == {}
    activations.remember_activations({"gpu01": "venv:/a", "gpu02:2222": "venv:/b"})
    activations.remember_activations({"gpu01": "venv:/c"})
    assert activations.read_activations() == {"gpu01": "venv:/c", "gpu02:2222": "venv:/b"}
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "[]", "{", '{"gpu01": 1}'])
def test_read_refuses_damaged_file(kept: Path, text: str) -> None:
    kept.write_text(text)
    kept.chmod(0o600)
    with pytest.raises(UsageError, match=r"activations\.json is damaged") as caught:
        activations.read_activations()
    assert caught.value.fix.startswith("rm ")


def test_read_refuses_file_writable_by_others(kept: Path) -> None:
    activations.remember_activations({"gpu01": "venv:/a"})
    kept.chmod(0o666)
    with pytest.raises(UsageError, match="may be written by everybody, and is not used"):
        activations.read_activations()
    kept.unlink()
    kept.symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="cannot be read"):
        activations.read_activations()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("GPU01", "gpu01"),
        ("gpu01:2222", "gpu01:2222"),
        ("FE80::0:1", "fe80::1"),
        ("[fe80::1]:22", "[fe80::1]:22"),
    ],
)
def test_machine_of_gives_one_name_per_machine(line: str, name: str) -> None:
    (node,) = parse_nodes(line, "list")
    assert activations.machine_of(node) == name
