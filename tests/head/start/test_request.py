"""The request of a launch, before any node is checked."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.start.request import resolve_request, target_of


@pytest.mark.parametrize(
    ("typed", "option"),
    [("training.max_steps=5", "--set training.max_steps=5"), ("DEBUG=a b", "--env 'DEBUG=a b'")],
)
def test_target_of_refuses_setting_in_place_of_program(
    typed: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        target_of(LaunchArguments(program=(typed, "train.py")))
    assert (error.value.what, error.value.fix) == (
        f"{typed} is not a program",
        f"did you mean: {option}",
    )
    Path(typed).touch()
    assert target_of(LaunchArguments(program=(typed,))).name == typed


@pytest.mark.parametrize(
    ("typed", "kind", "name", "args"),
    [
        ("python train.py --lr 1", "auto", "train.py", ("--lr", "1")),
        ("python3 -m pkg.train x", "module", "pkg.train", ("x",)),
        ("python -u train.py -u", "auto", "train.py", ("-u",)),
        ("python -u -m pkg.train x", "module", "pkg.train", ("x",)),
        ("python -u", "auto", "python", ("-u",)),
        ("python -u -O train.py", "auto", "python", ("-u", "-O", "train.py")),
        ("python -c pass", "auto", "python", ("-c", "pass")),
        ("python -O train.py", "auto", "python", ("-O", "train.py")),
        ("/opt/py/bin/python train.py", "auto", "/opt/py/bin/python", ("train.py",)),
        ("python", "auto", "python", ()),
    ],
)
def test_target_of_removes_python_before_script(
    typed: str, kind: str, name: str, args: tuple[str, ...]
) -> None:
    target = target_of(LaunchArguments(program=tuple(typed.split())))
    assert (target.kind, target.name, target.args) == (kind, name, args)


def test_target_of_refuses_quoted_command() -> None:
    with pytest.raises(UsageError) as caught:
        target_of(LaunchArguments(program=("python train.py --lr 1",)))
    assert caught.value.fix == "type: master_launch python train.py --lr 1"
    assert target_of(LaunchArguments(program=("my program",))).name == "my program"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("venv:.venv", "venv:{here}/.venv"),
        ("script:../env.sh", "script:{above}/env.sh"),
        ("venv:~/v", "venv:~/v"),
        ("venv:/v", "venv:/v"),
        ("conda:a", "conda:a"),
    ],
)
def test_resolve_makes_activate_path_absolute(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = resolve_request(LaunchArguments(program=("t.py",), launch={"activate": typed}))
    expected = meant.format(here=tmp_path, above=tmp_path.parent)
    assert request.config.launch.activate == expected


def test_resolve_suggests_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.py").touch()
    assert resolve_request(LaunchArguments(program=("solw.py",))).target.near.endswith("'slow.py'?")
    assert not resolve_request(LaunchArguments(program=("slow.py",))).target.near


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ({"program": ("sub/my train.py", "--lr", "1")}, "my_train"),
        ({"module": "pkg.train"}, "pkg.train"),
        ({"program": ("./run.sh",), "launch": {"name": "mine"}}, "mine"),
        ({"program": ("./run.sh",), "launch": {"name": "multinode"}}, "multinode"),
        ({"program": ("_.py",)}, "multinode"),
        ({}, "multinode"),
    ],
)
def test_resolve_names_experiment_after_script(typed: dict[str, Any], name: str) -> None:
    assert resolve_request(LaunchArguments(**typed)).config.launch.name == name
