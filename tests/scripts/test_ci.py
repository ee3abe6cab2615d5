""".ci/run tests a clone of what is committed, where people clone, and leaves nothing behind."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Stands in for scripts/test.sh: says where it runs, with what, and ends as it is asked to.
TESTS = '#!/bin/sh\necho "in $PWD with $*"\ncat file\nls -d .venv 2>/dev/null\nexit "${CODE:-0}"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    place = tmp_path / "checkout"
    (place / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", place / ".ci" / "run")
    (place / "scripts").mkdir()
    (place / "scripts" / "test.sh").write_text(TESTS)
    (place / "scripts" / "test.sh").chmod(0o755)
    (place / "file").write_text("committed\n")
    (tmp_path / "home").mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "the first"]):
        subprocess.run(["git", "-C", str(place), *words], check=True)
    return place


def run(checkout: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / ".ci" / "run", *words],
        env={"PATH": os.environ["PATH"], "HOME": str(checkout.parent / "home"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_ci_tests_committed_clone_in_path_with_space(checkout: Path) -> None:
    (checkout / "file").write_text("edited\n")
    (checkout / "new").write_text("")
    done = run(checkout, "-k", "two words")
    assert done.returncode == 0, done.stderr
    home = checkout.parent / "home"
    assert f"in {home}/a clone " in done.stdout
    assert "with -q --durations=10 -k two words\ncommitted\n" in done.stdout
    said = done.stdout.partition("NOT tested, as it is not committed:\n")[2]
    assert said.startswith(" M file\n?? new\n")
    assert "the first" in done.stdout and not list(home.iterdir())
    assert (checkout / "file").read_text() == "edited\n"


def test_ci_exits_with_code_of_tests(checkout: Path) -> None:
    done = run(checkout, CODE="5", HOME="/proc/no home", TMPDIR=str(checkout.parent))
    assert done.returncode == 5
    assert "NOT tested" not in done.stdout
    assert f"in {checkout.parent}/a clone " in done.stdout
    assert sorted(path.name for path in checkout.parent.iterdir()) == ["checkout", "home"]


def test_ci_leaves_immovable_venv_behind(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    assert "they cannot be moved" in done.stdout
    assert "committed\n.venv" not in done.stdout and python.exists()
