"""The demo: a real cluster and a real run, its picture, its end by Ctrl-C, nothing left behind."""

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.config import load
from orchestrator.config.launch import Launch, LaunchArguments
from orchestrator.config.schema import FsdpConfig, OptimizerConfig
from orchestrator.local_cluster import demo
from tests.clusters.require import require_sshd
from tests.launching import BIN, PATIENCE, Command
from tests.node.running import wait_until

pytestmark = pytest.mark.slow

Start = Callable[..., Command]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty directory to type the demo in, and one that it makes its temporary files in."""
    require_sshd()
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()
    return tmp_path / "here"


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Type the demo; what a failed test has left of it is killed, and its cluster follows."""
    commands = []

    def start(*words: str) -> Command:
        env = {"TMPDIR": str(place.parent / "tmp")}
        commands.append(Command([str(BIN / "orchestrator"), "demo", *words], place, env))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)


def nothing_left(place: Path) -> bool:
    """No key, no SSH server, no rank: all of them name the temporary directory."""
    mark = str(place.parent / "tmp").encode()
    living = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                living += [entry.name] if mark in text else []
        except OSError:
            continue
    return not living and not list((place.parent / "tmp").iterdir())


def test_demo_trains_outside_repository(place: Path, start: Start) -> None:
    root = ["--nproc", "1", "--experiments", "my runs"]
    command = start("--", *root, "--set", "training.max_steps=12")
    assert command.finish() == 0, command.text
    assert "node0 rank0 | hybrid_shard: 2 copies of the parameters, each in 1 shard" in command.text
    assert re.search(r"node1 rank1 \| ranks 1 to 1 of 2 are here: .*, CPU", command.text)
    assert re.search(r"node0 rank0 \| step 12/12 ", command.text)
    first, last = map(
        float, re.findall(r"loss (\d\.\d+) -> (\d\.\d+) in 12 steps", command.text)[0]
    )
    assert first > last + 1
    (experiment,) = (place / "my runs").glob("demo_*")
    assert f"my runs/{experiment.name} has job.json" in command.text
    assert nothing_left(place)


def test_kill_costs_no_loss(place: Path, start: Start) -> None:
    command = start("--kill", "--", "--nproc", "1")
    assert command.finish() == 0, command.text
    assert "killed by signal 9" in command.text
    assert re.search(r"from memory .*[1-9] ?.?B came from other nodes", command.text)
    # On a busy machine the state of the last step may not have left the node yet.
    found = re.findall(r"2 faults, [012] steps lost, losses (.*)", command.text)
    assert found == ["equal to the undisturbed run to the bit"]
    assert nothing_left(place)


def test_kill_refuses_script(place: Path, start: Start) -> None:
    command = start("--kill", "--", "train.py")
    assert command.finish() == 2, command.text
    assert "leave out the script" in command.text
    assert nothing_left(place)


def test_demo_exits_with_code_of_job(place: Path, start: Start) -> None:
    (place / "fails.py").write_text("raise SystemExit(3)\n")
    command = start("--size", "1", "--", "--no-torchrun", "fails.py")
    assert command.finish() == 1, command.text
    assert "loss" not in command.text
    assert "job.json" in command.text
    assert nothing_left(place)


def test_ctrl_c_ends_job_and_cluster(place: Path, start: Start) -> None:
    (place / "waits.py").write_text("import time\nprint('ready')\ntime.sleep(1000)\n")
    command = start("--size", "1", "--", "--no-torchrun", "waits.py")
    command.wait_for("ready")
    # A terminal sends the signal to the whole group.
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.finish() == 130
    assert "asking all ranks to save and stop" in command.text
    # One Ctrl-C is not passed on twice.
    assert "killing" not in command.text
    assert "job.json" in command.text
    assert nothing_left(place)


def test_detached_job_ends_with_cluster(place: Path, start: Start) -> None:
    (place / "waits.py").write_text("import time\ntime.sleep(1000)\n")
    command = start("--size", "1", "--", "--detach", "--no-torchrun", "waits.py")
    assert command.finish() == 0, command.text
    assert re.search(r"ended \d+ process.*nothing left", command.text)
    # The background head in particular must be gone.
    wait_until(lambda: nothing_left(place))


def test_keep_holds_nodes_for_printed_commands(place: Path, start: Start, tmp_path: Path) -> None:
    (place / "hello.py").write_text("print('hello')\n")
    command = start("--keep", "--size", "1", "--", "--no-torchrun", "hello.py")
    command.wait_for("Ctrl-C here ends them")
    typed = re.findall(r"^ {4}(source .*|master_launch .*)$", command.text, re.M)
    assert [word.split()[0] for word in typed] == ["source", "master_launch"]
    elsewhere = tmp_path / "my project"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text("print('hello')\n")
    done = subprocess.run(
        ["bash", "-ec", "\n".join(typed)],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| hello") == demo.SLOTS
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.finish() == 0
    assert nothing_left(place)


def test_demo_without_torch_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckFailed) as told:
        demo.run_demo(2, False, False, (), LaunchArguments())
    assert told.value.fix == f"uv pip install --python {shlex.quote(sys.executable)} torch numpy"


def test_default_config_file_matches_defaults() -> None:
    shown = load.load_config(REPOSITORY / "config/multi_node/distributed_two_nodes.yaml")
    assert shown.launch == Launch()
    assert shown.optimizer == OptimizerConfig()
    assert shown.fsdp == FsdpConfig()
