"""The package as a wheel holds it, for those who have no clone."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("orchestrator", "config", "docs", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(*command: str, place: Path, library: Path | None = None) -> str:
    env = os.environ | ({"PYTHONPATH": str(library)} if library else {})
    done = subprocess.run(
        [sys.executable, *([] if command[0].startswith("-") else ["-m"]), *command],
        env=env,
        cwd=place,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def git(place: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(place), *names, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def setup_of(place: Path) -> dict[str, Any]:
    return runpy.run_path(str(place / "setup.py"), run_name="read")


def test_the_version_is_that_of_git(tmp_path: Path) -> None:
    """Of a tag, of a commit, of an edit; in a shallow clone, and where there is no git."""
    first, plain = tmp_path / "first", tmp_path / "plain"
    version = "orchestrator/common/version.py"
    for place in (first, plain):
        (place / version).parent.mkdir(parents=True)
        (place / version).write_text('__version__ = "3.4.0.dev0"\n')
        shutil.copy(ROOT / "setup.py", place)
    git(first, "init", "-q")
    git(first, "add", ".")
    git(first, "commit", "-qm", "one")
    git(first, "commit", "-qm", "two", "--allow-empty")
    commit = git(first, "rev-parse", "--short=9", "HEAD")
    assert setup_of(first)["VERSION"] == f"3.4.0.dev0+g{commit}"
    git(tmp_path, "clone", "-q", "--depth=1", "--no-tags", f"file://{first}", "shallow")
    assert setup_of(tmp_path / "shallow")["VERSION"] == f"3.4.0.dev0+g{commit}"
    git(first, "tag", "v3.4.0")
    assert setup_of(first)["VERSION"] == "3.4.0"
    (first / "setup.py").write_text((first / "setup.py").read_text() + "\n")
    assert setup_of(first)["VERSION"] == f"3.4.0.dev0+g{commit}.edited"
    git(first, "commit", "-qam", "three")
    git(first, "tag", "v9.9")
    with pytest.raises(SystemExit, match=r"v9\.9 is on this commit, and .* leads to 3\.4\.0"):
        setup_of(first)
    assert setup_of(plain)["VERSION"] == "3.4.0.dev0"
    inside = first / "another"
    shutil.copytree(plain, inside)
    assert setup_of(inside)["VERSION"] == "3.4.0.dev0", "the commit is of what is around it"


def test_the_readme_needs_no_clone() -> None:
    readme = setup_of(ROOT)["readme"]
    relative = re.compile(r"\]\((?!https?:|#)")
    assert relative.search((ROOT / "README.md").read_text()), "nothing to prove"
    assert not relative.search(readme("", "main"))
    text = readme("https://example.org/us/it", "v3")
    assert not relative.search(text)
    assert "](https://example.org/us/it/blob/v3/docs/" in text
    assert re.search(r"!\[[^\]]*\]\(https://example.org/us/it/raw/v3/docs/", text)


def test_it_holds_all_that_is_used(tmp_path: Path) -> None:
    source, empty, library = tmp_path / "source", tmp_path / "empty", tmp_path / "library"
    for path in (source, empty, library):
        path.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, source)
    git(source, "init", "-q")
    path = source / "orchestrator/common/version.py"
    path.write_text('__version__ = "3.4.0.dev0"\n')
    git(source, "add", ".")
    git(source, "commit", "-qm", "one")
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    run("pip", "wheel", *options, "--wheel-dir", str(tmp_path), str(source), place=empty)
    (wheel,) = tmp_path.glob("master_launch-*.whl")
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if name.startswith("orchestrator/")}
        file.extractall(library)
    version = wheel.name.split("-")[1].replace("_", "+", 1)
    assert version == f"3.4.0.dev0+g{git(source, 'rev-parse', '--short=9', 'HEAD')}"
    (told,) = library.glob("*.dist-info/METADATA")
    assert Parser().parsestr(told.read_text())["Version"] == version
    front = "from orchestrator import __version__ as v; print(v)"
    for command in (["orchestrator", "--version"], ["-c", front]):
        assert run(*command, place=empty, library=library).split()[-1] == version
    assert inside == {
        os.path.relpath(Path(directory) / name, source)
        for directory, _, names in os.walk(source / "orchestrator", followlinks=True)
        for name in names
    }
    # Nothing here but the wheel: the demo's config is the wheel's.
    said = run("orchestrator", "demo", "--dry-run", place=empty, library=library)
    assert "--config config/demo.yaml" in said
