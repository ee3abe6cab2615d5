"""The shell scripts, in a clone whose path has a space, with stand-ins for what they call."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Says what it was called with, one argument a line; `status` and `makes` decide the rest.
STAND_IN = '#!/bin/sh\nprintf "%s\\n" "{name} in $PWD" "$@" >>"{log}"\n{rest}\n'
VENV = """
case "$2" in *find_spec*) case "$3" in pip) exit 0;; esac; [ -e "{clone}/has-$3" ]; exit;; esac
case "$*" in *" -e "*) printf '#!/bin/sh\\necho demo "$@"\\n' >"{clone}/.venv/bin/orchestrator"
chmod +x "{clone}/.venv/bin/orchestrator";; esac
case "$*" in *torch==*) touch "{clone}/has-torch";; esac
case "$*" in *numpy*) touch "{clone}/has-numpy";; esac
"""


class Clone:
    def __init__(self, root: Path) -> None:
        self.root = root / "a clone"
        self.log = root / "log"
        self.bin = root / "bin"
        self.bin.mkdir()
        shutil.copytree(SCRIPTS, self.root / "scripts")
        (self.root / "pyproject.toml").write_text("[project]\n")

    def stand_in(self, path: Path, rest: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN.format(name=path.name, log=self.log, rest=rest))
        path.chmod(0o755)

    def venv(self) -> None:
        self.stand_in(self.root / ".venv/bin/python", VENV.format(clone=self.root))

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.root)}
        return subprocess.run(
            words, cwd="/", env={**path, **env}, capture_output=True, text=True, check=False
        )

    def setup(self, words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "-c", f'set -eu; . "{self.root}/scripts/setup.sh"; {words}', **env)

    def calls(self, start: str) -> list[str]:
        """Return the recorded calls, one a line, without those that look for modules."""
        text = self.log.read_text() if self.log.exists() else ""
        calls = text.replace("\n", " ").replace(start, "\n" + start).split("\n")[1:]
        return [call.strip() for call in calls if "find_spec" not in call]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_are_executable(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    sourced = path.name in ("setup.sh", "config_node.sh")
    assert sourced or os.access(path, os.X_OK)


def test_setup_installs_torch_and_package_once(clone: Clone) -> None:
    clone.venv()
    first = clone.setup("need_venv")
    assert first.returncode == 0, first.stderr
    pip = "-m pip install --disable-pip-version-check --quiet"
    assert clone.calls("python in") == [f"python in {clone.root} {pip} torch==2.13.0 numpy -e ."]
    assert first.stdout.count("setup: installing ") == 2
    clone.log.unlink()
    assert clone.setup("need_venv").stdout == ""
    assert clone.calls("python in") == []


def test_setup_installs_extras_once(clone: Clone) -> None:
    clone.venv()
    # The file marks a torch that the machine's owner installed for GPUs.
    (clone.root / "has-torch").touch()
    again = "need_venv test; need_venv test"
    assert clone.setup(again).returncode == 0
    (clone.root / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    assert clone.setup(again).returncode == 0
    ends = [call.rpartition("--quiet ")[2] for call in clone.calls("python in")]
    assert ends == ["numpy -e .[test]", "-e .[test]"]


def test_setup_retries_failed_pip(clone: Clone) -> None:
    clone.venv()
    python = clone.root / ".venv/bin/python"
    fails = '#!/bin/sh\ncase "$*" in *" -e "*) exit 1;; esac\n'
    python.write_text(fails + python.read_text())
    for _ in range(2):
        failed = clone.setup("need_venv")
        assert failed.returncode == 3
        assert "setup: pip could not install torch==2.13.0 numpy -e ." in failed.stderr


@pytest.mark.slow
def test_setup_makes_venv_in_fresh_clone(clone: Clone) -> None:
    failed = clone.setup("make_venv", PYTHON="none")
    assert (failed.returncode, failed.stdout) == (3, "")
    assert "setup: Python 3.10 or newer is needed" in failed.stderr
    python = clone.root / ".venv/bin/python"
    made = clone.setup(f'make_venv; "{python}" -c "import pip; print(pip.__file__)"')
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[-1].startswith(f"{clone.root}/.venv/")


def test_setup_installs_missing_system_packages(clone: Clone) -> None:
    clone.stand_in(clone.bin / "apt-get")
    clone.stand_in(clone.bin / "id", "echo 0")
    assert clone.setup("need_apt sh dash").stdout == ""
    assert clone.setup("need_apt no-such-program one two").returncode == 0
    (call,) = clone.calls("apt-get in")
    assert call.startswith("apt-get in / install -y ")
    assert call.endswith(" one two")


def test_setup_without_root_names_packages(clone: Clone) -> None:
    clone.stand_in(clone.bin / "apt-get")
    clone.stand_in(clone.bin / "id", "echo 1000")
    done = clone.setup("need_apt no-such-program openssh-server; echo not reached")
    assert done.returncode == 3
    assert done.stderr == (
        "setup: missing here: openssh-server;"
        " ask whoever is root for: apt-get install openssh-server\n"
    )
    assert done.stdout == ""
    assert clone.calls("apt-get in") == []


def test_demo_script_passes_arguments(clone: Clone) -> None:
    clone.venv()
    clone.stand_in(clone.bin / "sshd")
    done = clone.run("bash", str(clone.root / "scripts/demo.sh"), "--keep", "two words")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "demo demo --keep two words"


@pytest.mark.parametrize(
    ("typed", "marks", "workers"),
    [
        (["--fast", "-k", "two words"], ["-m", "not slow and not cluster and not browser"], 3),
        (["-k", "two words"], [], 5),
    ],
)
def test_test_sh_passes_markers_and_arguments_to_pytest(
    clone: Clone, typed: list[str], marks: list[str], workers: int
) -> None:
    clone.venv()
    for name in ("sshd", "ssh", "ip", "nft", "munged", "slurmctld"):
        clone.stand_in(clone.bin / name)
    for name in ("pytest", "ruff", "mypy"):
        clone.stand_in(clone.root / ".venv/bin" / name)
    # The real nproc does the same.
    clone.stand_in(clone.bin / "nproc", "echo ${OMP_NUM_THREADS:-2}")
    clone.stand_in(clone.bin / "id", "echo 0")
    done = clone.run(str(clone.root / "scripts/test.sh"), *typed, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    spread = ["-n", str(workers), "--dist", "worksteal"]
    assert clone.log.read_text().splitlines()[-len([*spread, *marks]) - 3 :] == [
        *(f"pytest in {clone.root}", *spread, *marks, "-k", "two words")
    ]
    looked_at = [call for call in clone.calls("ruff in") if call.startswith("ruff in")]
    assert len(looked_at) == (0 if "--fast" in typed else 2)


def test_master_launch_script_runs_at_top_of_repository(clone: Clone) -> None:
    """The installed command with the hook, the arguments as they are, the environment as it is."""
    where = clone.root / ".venv/bin/master_launch"
    clone.stand_in(where, f'printf "%s\\n" "$CONFIG_FILE" "$MASTER_PORT" >>"{clone.log}"; exit 4')
    script = str(clone.root / "scripts/multi_node/master_launch.sh")
    done = clone.run(
        script, "--set", "a=b c", "x.py", CONFIG_FILE="config/my own.yaml", MASTER_PORT="29600"
    )
    assert done.returncode == 4
    assert clone.log.read_text().splitlines() == [
        f"master_launch in {clone.root}",
        "--hook",
        f"{clone.root}/scripts/multi_node/config_node.sh",
        *("--set", "a=b c", "x.py"),
        *("config/my own.yaml", "29600"),
    ]
    where.rename(clone.bin / "master_launch")
    assert clone.run(script).returncode == 4
    (clone.bin / "master_launch").unlink()
    missing = clone.run(script)
    assert missing.returncode == 3
    assert f"pip install -e '{clone.root}'" in missing.stderr


def test_shipped_hook_is_comments_alone() -> None:
    """Then no shell is started for it on any node."""
    from orchestrator.head.start.variables import read_hook

    assert read_hook(str(SCRIPTS / "multi_node/config_node.sh")) == ""
