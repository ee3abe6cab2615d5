"""The package as a wheel holds it, for those who have no clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("orchestrator", "config", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str, place: Path, library: Path | None = None) -> str:
    env = os.environ | ({"PYTHONPATH": str(library)} if library else {})
    done = subprocess.run(
        [sys.executable, "-m", *command],
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
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    run("pip", "wheel", *options, "--wheel-dir", str(tmp_path), str(source), place=empty)
    (wheel,) = tmp_path.glob("master_launch-*.whl")
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if name.startswith("orchestrator/")}
        file.extractall(library)
    assert inside == {
        os.path.relpath(Path(directory) / name, source)
        for directory, _, names in os.walk(source / "orchestrator", followlinks=True)
        for name in names
    }
    # Nothing here but the wheel: the demo's config is the wheel's.
    said = run("orchestrator", "demo", "--dry-run", place=empty, library=library)
    assert "--config config/demo.yaml" in said
