"""The environment that requirements select, and the wheels that fit a node."""

import hashlib
import platform
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed, NodeError, UsageError
from orchestrator.head.environments import wheels
from orchestrator.head.environments.command import BuildOutcome, how_to_activate, kind_of
from orchestrator.head.environments.wheels import Kind, Requirements
from orchestrator.head.transfer.tree import tree_of_files
from orchestrator.protocol.requests.environments import EnvironmentState

LINUX = Kind((3, 11), "x86_64", "glibc 2.36")
HERE = Kind(sys.version_info[:2], platform.machine(), "glibc 2.36")


def wheel(directory: Path, name: str, version: str, needs: str = "") -> None:
    """A wheel of one module that knows its version."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


def test_key_changes_with_every_input(tmp_path: Path) -> None:
    file, more = tmp_path / "requirements.txt", tmp_path / "more.txt"
    file.write_text("-r more.txt\na\n")
    more.write_text("b\n")

    def key(*links: str, index: bool = True, machine: str = "x86_64", python: int = 11) -> str:
        read = wheels.read_requirements((str(file),), links, index=index)
        return Kind((3, python), machine, "glibc 2.36").key(read)

    first = key()
    assert first == key() and len(first) == 16
    keys = {first, key("/links"), key(index=False), key(machine="aarch64"), key(python=12)}
    more.write_text("b==2\n")
    keys.add(key())
    file.write_text("-r more.txt\na==1\n")
    keys.add(key())
    assert len(keys) == 7


def test_read_finds_default_requirements_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"there is no uv\.lock"):
        wheels.read_requirements((), (), index=True)
    for name in ("pyproject.toml", "requirements.txt", "uv.lock"):
        Path(name).write_text("")
        assert wheels.read_requirements((), (), index=True).file == Path(name)
    Path("requirements.txt").write_text("-r gone.txt\n")
    with pytest.raises(UsageError, match=r"gone\.txt cannot be read"):
        wheels.read_requirements(("requirements.txt",), (), index=True)


def test_read_tells_typed_packages_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    # A directory of that name is not a requirements file.
    (tmp_path / "torch").mkdir()

    def read(*words: str) -> Requirements:
        return wheels.read_requirements(words, (), index=True)

    typed = read("torch==2.13.0", "ray[train]>=2", "numpy")
    assert typed.file.read_text() == "numpy\nray[train]>=2\ntorch==2.13.0\n"
    assert typed.title == "torch==2.13.0, ray[train]>=2, numpy"
    assert read("torch").file.read_text() == "torch\n"
    # The order does not make another environment.
    again = read("numpy", "torch==2.13.0", "ray[train]>=2")
    assert LINUX.key(again) == LINUX.key(typed)
    Path("requirements.txt").write_text("einops\n")
    both = read("requirements.txt", "timm")
    assert both.file.read_text() == f"-r {tmp_path}/requirements.txt\ntimm\n"
    assert b"einops" in both.text
    Path("mine-1.0-py3-none-any.whl").write_bytes(b"")
    wheel_of = read("mine-1.0-py3-none-any.whl").file.read_text()
    assert wheel_of == f"{tmp_path}/mine-1.0-py3-none-any.whl\n"
    for words, error in (
        (("requirments.txt",), r"requirments\.txt cannot be read"),
        (("uv.lock", "numpy"), r"uv\.lock cannot be combined with packages"),
        (("./ torch",), "neither a file here nor a package"),
        (("--pre", "torch"), "neither a file here nor a package"),
    ):
        with pytest.raises(UsageError, match=error):
            read(*words)


def test_kind_lists_platforms_for_libc() -> None:
    old = Kind((3, 9), "aarch64", "glibc 2.30")
    assert old.uv_platform == "aarch64-manylinux_2_28"
    assert old.pip_platforms[0] == "manylinux_2_30_aarch64"
    assert "manylinux2014_aarch64" in old.pip_platforms
    assert Kind((3, 12), "x86_64", "musl").uv_platform == "x86_64-unknown-linux-musl"


@pytest.mark.parametrize("libc", ["glibc ../../x", "", "glibc", "bionic 1.2", "glibc 2.36\n"])
def test_kind_of_refuses_invalid_answer_of_node(libc: str) -> None:
    """It becomes part of the name of a directory here."""
    state = EnvironmentState(path="/", version=(3, 11), machine="x86_64", libc=libc)
    assert isinstance(kind_of(state), NodeError)
    assert isinstance(kind_of(state.replace(libc="musl", machine="../x")), NodeError)
    assert kind_of(state.replace(libc="glibc 2.36")) == LINUX


@pytest.mark.slow
def test_wheels_for_downloads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    links = tmp_path / "links"
    links.mkdir()
    wheel(links, "mine", "1.0", "other>=2")
    for version in ("1.0", "2.1"):
        wheel(links, "other", version)
    file = tmp_path / "requirements.txt"
    file.write_text("mine\n")
    sources = wheels.read_requirements((str(file),), (str(links),), index=False)
    directory = wheels.wheels_for(HERE, sources)
    names = ["mine-1.0-py3-none-any.whl", "other-2.1-py3-none-any.whl"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert [
        entry.path.decode() for entry in tree_of_files(directory, lambda _: 0o644).entries
    ] == names
    (links / "mine-1.0-py3-none-any.whl").unlink()
    assert wheels.wheels_for(HERE, sources) == directory
    # One of the messages is about uv, which no index had.
    assert len(said) == 2
    with pytest.raises(CheckFailed, match=r"cannot be met for Python 3") as failed:
        wheels.wheels_for(replace(HERE, libc="glibc 2.37"), sources)
    assert "No matching distribution found for mine" in failed.value.what
    assert not [path for path in directory.parent.iterdir() if path != directory]


@pytest.mark.slow
def test_wheels_for_refuses_wheel_without_matching_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel(tmp_path, "mine", "1.0")
    total = hashlib.sha256(next(tmp_path.glob("*.whl")).read_bytes()).hexdigest()
    file = tmp_path / "requirements.txt"
    for digest in (total, "0" * 64):
        file.write_text(f"mine==1.0 --hash=sha256:{digest}\n")
        sources = wheels.read_requirements((str(file),), (str(tmp_path),), index=False)
        if digest == total:
            assert list(wheels.wheels_for(HERE, sources).glob("mine-*.whl"))
        else:
            with pytest.raises(CheckFailed, match=r"(?i)hash"):
                wheels.wheels_for(HERE, sources)
    with pytest.raises(CheckFailed, match="has hashes, which are checked for Python"):
        wheels.wheels_for(replace(HERE, version=(3, 1)), sources)


def test_pins_without_uv_refuses_what_pip_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    project = Requirements(tmp_path / "pyproject.toml", b"")
    plain = Requirements(tmp_path / "requirements.txt", b"")
    assert wheels.pip_options(HERE, plain, tmp_path, "no") == ["-r", str(plain.file)]
    for kind, sources in ((HERE, project), (replace(HERE, version=(3, 1)), plain)):
        with pytest.raises(CheckFailed, match="has to be read by uv"):
            wheels.pip_options(kind, sources, tmp_path, "no")


def test_how_to_activate_names_path_of_each_node() -> None:
    common = "/root/.orchestrator/environments"
    same = [
        BuildOutcome("a", f"{common}/{'0' * 16}"),
        BuildOutcome("b", f"/home/b{common[5:]}/{'0' * 16}"),
    ]
    place = "activate=venv:~/.orchestrator/environments"
    assert how_to_activate(same) == [f": {place}/{'0' * 16}"]
    other = [*same, BuildOutcome("c", f"{common}/{'1' * 16}")]
    assert how_to_activate(other) == [
        f", after a, b: {place}/{'0' * 16}",
        f", after c: {place}/{'1' * 16}",
    ]
