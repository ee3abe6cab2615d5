"""A login's notes about machines are believed only if other users cannot write them."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.records import cordons
from orchestrator.records.machines import machine_of


def test_a_cordon_is_kept_until_it_is_lifted(login: Path) -> None:
    assert cordons.read() == {}
    (first,) = cordons.add(["gpu01"], "a bad fan")
    cordons.add(["gpu02:2222"], "")
    (again,) = cordons.add(["gpu01"], "")
    assert (again.since, again.reason) == (first.since, "a bad fan")
    assert list(cordons.read()) == ["gpu01", "gpu02:2222"]
    assert first.words.startswith("a bad fan, since 20")
    assert stat.S_IMODE((login / cordons.FILE).stat().st_mode) == 0o600
    cordons.remove(["gpu01", "gpu09"])
    assert list(cordons.read()) == ["gpu02:2222"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"gpu01": 1}', '{"gpu01": {"since": "now"}}', '{"gpu01": {"since": 1e99}}'],
)
def test_what_is_no_file_of_ours_stops_a_launch_with_a_sentence(login: Path, text: str) -> None:
    (login / cordons.FILE).write_text(text)
    (login / cordons.FILE).chmod(0o600)
    with pytest.raises(UsageError, match=r"cordons\.json is not") as caught:
        cordons.read()
    assert caught.value.fix.startswith("rm ")


def test_what_others_can_write_is_not_believed(login: Path) -> None:
    cordons.add(["gpu01"], "")
    (login / cordons.FILE).chmod(0o666)
    with pytest.raises(UsageError, match="may be written by everybody, and is not believed"):
        cordons.read()
    (login / cordons.FILE).unlink()
    (login / cordons.FILE).symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="cannot be read"):
        cordons.read()


@pytest.mark.parametrize(
    ("host", "port", "name"),
    [
        ("GPU01", None, "gpu01"),
        ("gpu01", 2222, "gpu01:2222"),
        ("FE80::0:1", None, "fe80::1"),
        ("fe80::1", 22, "[fe80::1]:22"),
    ],
)
def test_one_machine_has_one_name(host: str, port: int | None, name: str) -> None:
    assert machine_of(SimpleNamespace(host=host, port=port)) == name
