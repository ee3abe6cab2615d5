"""All readers of config.yaml get the same values."""

from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config import resolved


def test_text_and_keys_are_read(tmp_path: Path) -> None:
    assert (resolved.read_text(tmp_path), resolved.read_keys(tmp_path)) == ("", {})
    path = tmp_path / "config.yaml"
    path.write_text("a: {b: é}\n", encoding="utf-8")
    assert resolved.read_text(tmp_path) == "a: {b: é}\n"
    assert resolved.read_keys(tmp_path) == {"a": {"b": "é"}}
    # None of these is a config of ours.
    for text in ("", "- 1", "words"):
        path.write_text(text)
        assert resolved.read_keys(tmp_path) == {}


@pytest.mark.parametrize(
    "text",
    [b"a: [", b"\x00", b"!!python/object:os.system {}", b"[" * 1000, b"a: &a [1]\nb: *a\n"],
)
def test_invalid_yaml_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(UsageError, match=r"config\.yaml cannot be read"):
        resolved.read_keys(tmp_path)


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a: 1")
    (tmp_path / "config.yaml").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="cannot be read"):
        resolved.read_text(tmp_path)
