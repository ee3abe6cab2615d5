"""Which environment requirements make, and which wheels fit a node."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed, NodeError, UsageError
from orchestrator.head.environments import build, refusals, requirements, wheels
from orchestrator.head.environments.build import Outcome
from orchestrator.head.environments.command import how_to_activate
from orchestrator.head.environments.wheels import Kind
from orchestrator.head.screen import output
from orchestrator.head.transfer.tree import of_files
from orchestrator.protocol.requests.environments import EnvironmentState

LINUX = Kind((3, 11), "x86_64", "glibc 2.36")


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


def test_the_key_changes_with_all_that_decides(tmp_path: Path) -> None:
    file, more = tmp_path / "requirements.txt", tmp_path / "more.txt"
    file.write_text("-r more.txt\na\n")
    more.write_text("b\n")

    def key(*links: str, index: bool = True, machine: str = "x86_64", python: int = 11) -> str:
        read = requirements.read((str(file),), links, index=index)
        return read.key((3, python), machine, "glibc 2.36")

    first = key()
    assert first == key() and len(first) == 16
    keys = {first, key("/links"), key(index=False), key(machine="aarch64"), key(python=12)}
    more.write_text("b==2\n")
    keys.add(key())
    file.write_text("-r more.txt\na==1\n")
    keys.add(key())
    assert len(keys) == 7


def test_the_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"there is no uv\.lock"):
        requirements.read((), (), index=True)
    for name in ("pyproject.toml", "requirements.txt", "uv.lock"):
        Path(name).write_text("")
        assert requirements.read((), (), index=True).file == Path(name)
    Path("requirements.txt").write_text("-r gone.txt\n")
    with pytest.raises(UsageError, match=r"gone\.txt cannot be read"):
        requirements.read(("requirements.txt",), (), index=True)


def test_packages_that_are_typed_are_told_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch").mkdir()  # a directory of that name is not a file of requirements

    def read(*words: str) -> requirements.Requirements:
        return requirements.read(words, (), index=True)

    typed = read("torch==2.13.0", "ray[train]>=2", "numpy")
    assert typed.file.read_text() == "numpy\nray[train]>=2\ntorch==2.13.0\n"
    assert typed.title == "torch==2.13.0, ray[train]>=2, numpy"
    assert read("torch").file.read_text() == "torch\n"
    again = read("numpy", "torch==2.13.0", "ray[train]>=2")  # the order makes no other environment
    kind = (LINUX.version, LINUX.machine, LINUX.libc)
    assert again.key(*kind) == typed.key(*kind)
    Path("requirements.txt").write_text("einops\n")
    both = read("requirements.txt", "timm")
    assert both.file.read_text() == f"-r {tmp_path}/requirements.txt\ntimm\n"
    assert b"einops" in both.text
    Path("mine-1.0-py3-none-any.whl").write_bytes(b"")
    wheel_of = read("mine-1.0-py3-none-any.whl").file.read_text()
    assert wheel_of == f"{tmp_path}/mine-1.0-py3-none-any.whl\n"
    for words, error in (
        (("requirments.txt",), r"requirments\.txt cannot be read"),
        (("uv.lock", "numpy"), r"uv\.lock cannot stand beside packages"),
        (("./ torch",), "neither a file here nor a package"),
        (("to rch",), "neither a file here nor a package"),
        (("$(reboot)",), "neither a file here nor a package"),
    ):
        with pytest.raises(UsageError, match=error):
            read(*words)
    with pytest.raises(CheckFailed, match="is a directory"):
        read("./torch")


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("torch=2.13 numpy", "torch==2.13 numpy"),
        ("ray[train]=2", "'ray[train]==2'"),
        ("torch@2.13", "torch==2.13"),
        ("numpy>=1<2", "AS_FOR_PIP"),
        ("numpy,six", "numpy six"),
        ("pip install numpy", "numpy"),
        ("numpy=>2", "AS_FOR_PIP"),
    ],
)
def test_a_mistake_in_a_package_is_answered_with_what_to_type(typed: str, instead: str) -> None:
    words = f"type: orchestrator bootstrap {instead}"
    fix = requirements.AS_FOR_PIP if instead == "AS_FOR_PIP" else words
    with pytest.raises(UsageError) as refused:
        requirements.read(typed.split(), (), index=True)
    assert refused.value.fix == fix


def test_spaces_in_quotes_are_no_package() -> None:
    for typed, instead in (("numpy >=1 <2", "'numpy>=1,<2'"), ("numpy 2.1", "numpy==2.1")):
        with pytest.raises(UsageError) as refused:
            requirements.read((typed,), (), index=True)
        assert refused.value.fix == f"type: orchestrator bootstrap {instead}"


def test_a_shell_that_takes_a_version_for_a_file_is_seen(tmp_path: Path) -> None:
    """`bootstrap six>=1` without quotes."""
    program = (
        "import orchestrator.head.environments.requirements as r; r.refuse_redirection(['six'])"
    )
    words = [sys.executable, "-c", program]
    with (tmp_path / "=1.16").open("w") as file:
        done = subprocess.run(words, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert "type: orchestrator bootstrap 'six>=1.16'" in done.stderr


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("Because siix was not found in the package registry and you require siix", "siix"),
        ("Because cv2 was not found in the package\n    registry and", "opencv-python-headless"),
        ("all versions of sklearn have no usable wheels", "package scikit-learn"),
        ("Because numpy==1.19.5 has no usable wheels and", "versions numpy` lists"),
        ("Because there is no version of six==9.9 and you", "versions six` lists"),
        ("Because six was not found in the provided package locations", "no index was asked"),
        ("cause: Failed to fetch: http://127.0.0.1:9/simple/six/", "does not reach that index"),
        ("ERROR: No matching distribution found for siix==2", "versions siix` lists"),
        ("error: Couldn't parse requirement in `x` at\n position 0", "name==1.2"),
        ("/venv/bin/python: No module named pip", "-m ensurepip"),
        ("OSError: [Errno 28] No space left on device", "XDG_CACHE_HOME"),
        ("something else", ""),
    ],
)
def test_what_uv_and_pip_refuse_is_answered_with_what_to_type(said: str, fix: str) -> None:
    told = refusals.fix_of(said)
    assert fix in told if fix else not told


def test_what_fits_a_libc() -> None:
    old = Kind((3, 9), "aarch64", "glibc 2.30")
    assert old.uv_platform == "aarch64-manylinux_2_28"
    assert old.pip_platforms[0] == "manylinux_2_30_aarch64"
    assert "manylinux2014_aarch64" in old.pip_platforms
    assert Kind((3, 12), "x86_64", "musl").uv_platform == "x86_64-unknown-linux-musl"


@pytest.mark.parametrize("libc", ["glibc ../../x", "", "glibc", "bionic 1.2", "glibc 2.36\n"])
def test_what_a_node_says_of_itself_is_checked(libc: str) -> None:
    """It becomes part of the name of a directory here."""
    state = EnvironmentState(path="/", python="/p", version=(3, 11), machine="x86_64", libc=libc)
    assert isinstance(build.kind_of(state), NodeError)
    assert isinstance(build.kind_of(state.replace(libc="musl", machine="../x")), NodeError)
    assert build.kind_of(state.replace(libc="glibc 2.36")) == LINUX


@pytest.mark.slow
def test_wheels_are_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    links = tmp_path / "links"
    links.mkdir()
    wheel(links, "mine", "1.0", "other>=2")
    for version in ("1.0", "2.1"):
        wheel(links, "other", version)
    file = tmp_path / "requirements.txt"
    file.write_text("mine\n")
    sources = requirements.read((str(file),), (str(links),), index=False)
    said: list[str] = []
    key = sources.key(LINUX.version, LINUX.machine, LINUX.libc)
    with output.heard_by(said.append):
        directory = wheels.wheels_for(LINUX, key, sources)
    names = ["mine-1.0-py3-none-any.whl", "other-2.1-py3-none-any.whl"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert [entry.path.decode() for entry in of_files(directory, lambda _: 0o644).entries] == names
    (links / "mine-1.0-py3-none-any.whl").unlink()
    with output.heard_by(said.append):
        assert wheels.wheels_for(LINUX, key, sources) == directory
    assert len(said) == 1
    with pytest.raises(CheckFailed, match=r"cannot be met for Python 3\.11") as failed:
        wheels.wheels_for(LINUX, "0" * 16, sources)
    assert "No matching distribution found for mine" in failed.value.what
    assert not [path for path in directory.parent.iterdir() if path != directory]


@pytest.mark.slow
def test_settings_of_pip_are_uv_s_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password is on no command line, lines are URLs, and pip's order of sources holds."""
    cap = tmp_path / "cap.txt"
    cap.write_text("six<2\n")
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nextra-index-url =\n    https://me:secret@a/simple\n    https://b/simple\n"
        f"find-links = /one /two\nconstraint = {cap}\nuser = true\n[download]\nindex-url = https://d/simple\n"
        "[install]\nindex-url = https://i/simple\n[list]\nindex-url = https://l/simple\n"
    )
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", f"/three {tmp_path} https://c/links")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setattr(wheels, "settings_of_pip", wheels.settings_of_pip.__wrapped__)
    sources = requirements.Requirements(tmp_path / "requirements.txt", b"six\n")
    found = wheels.variables_of_uv(sources)
    assert found["UV_EXTRA_INDEX_URL"] == "https://me:secret@a/simple https://b/simple"
    assert found["UV_INDEX_URL"] == "https://d/simple"
    assert found["UV_FIND_LINKS"] == f"{tmp_path},https://c/links"  # pip passes over others
    assert found["UV_CONSTRAINT"] == str(cap)
    capped = wheels.constrained(sources)
    cap.write_text("six<3\n")
    assert capped.text != wheels.constrained(sources).text != sources.text


def test_a_program_that_is_killed_has_refused_nothing(tmp_path: Path) -> None:
    words = ["/bin/sh", "-c", "touch $TMPDIR/half; kill -9 $$"]
    with pytest.raises(CheckFailed, match="sh was ended from outside, by SIGKILL"):
        wheels.run(words, "the requirements cannot be met", into=tmp_path / "new")
    assert not [*tmp_path.iterdir()]


def test_differences_are_named() -> None:
    one = Outcome("a", packages={"six": "1", "pip": "23", "only": "1"})
    other = Outcome("b", packages={"six": "2"})
    lost = Outcome("c", problem="gone", lost=True)
    assert build.differences([one, other, lost]) == [
        "only: 1 on a; none on b",
        "six: 1 on a; 2 on b",
    ]


def test_a_directory_is_no_wheel(tmp_path: Path) -> None:
    """Editable ones travel as code does; what was to be installed is not left out in silence."""
    (tmp_path / "project").mkdir()
    (tmp_path / "a project").mkdir()
    pinned = tmp_path / wheels.PINNED
    said: list[str] = []
    pinned.write_text(f"--no-index\n-e {tmp_path}/project\nsix==1.0 ; python_version > '3'\n")
    with output.heard_by(said.append):
        wheels.check_projects(pinned)
    assert pinned.read_text() == "--no-index\nsix==1.0 ; python_version > '3'\n"
    assert "project is not installed, only what it needs" in said[0]
    for line in (
        "{}",
        "{}[dev]",
        "name @ file://{}",
        "name[dev] @ file://{}/../a%20project  # why",
    ):
        pinned.write_text(line.format(tmp_path / "project") + "\n")
        with pytest.raises(CheckFailed, match=r"project is a directory(.|\n)*pip wheel --no-deps"):
            wheels.check_projects(pinned)


def test_old_downloads_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "cache", lambda: tmp_path)
    for name in ("new", "old"):
        (tmp_path / "wheels" / name).mkdir(parents=True)
        (tmp_path / "wheels" / name / "a.whl").write_bytes(bytes(5000))
    now = (tmp_path / "wheels/old").stat().st_mtime
    os.utime(tmp_path / "wheels/new", (now + wheels.UNUSED_SECONDS, now + wheels.UNUSED_SECONDS))
    assert wheels.prune(now + wheels.UNUSED_SECONDS + 1) >= 5000
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["new"]


def test_where_nodes_have_other_paths_each_is_told_its_own() -> None:
    common = "/root/.orchestrator/environments"
    same = [Outcome("a", f"{common}/{'0' * 16}"), Outcome("b", f"/home/b{common[5:]}/{'0' * 16}")]
    place = "activate=venv:~/.orchestrator/environments"
    assert how_to_activate(same) == [f": {place}/{'0' * 16}"]
    other = [*same, Outcome("c", f"{common}/{'1' * 16}")]
    assert how_to_activate(other) == [
        f", after a, b: {place}/{'0' * 16}",
        f", after c: {place}/{'1' * 16}",
    ]
