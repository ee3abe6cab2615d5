"""Our program starts inside of what surrounds it: an environment, a container, any login shell."""

import os
import shlex
import shutil
import stat
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.subprocess_transport import ProcessConnection
from orchestrator.head.nodes import server_command
from orchestrator.head.nodes.environment import check_environment
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.requests.start import Hook
from tests.node.running import wait_until

pytestmark = pytest.mark.slow

SECONDS = 30.0
# What `conda shell.posix hook` prints is a function that asks the program what to evaluate.
CONDA = """#!/bin/sh
case "$1 $2" in
"shell.posix hook")
    echo noise on standard error >&2
    echo "conda() { eval \\"\\$('$0' shell.posix \\"\\$@\\")\\"; }" ;;
"shell.posix activate")
    if [ -d "ROOT/envs/$3" ]; then
        echo "export CONDA_PREFIX='ROOT/envs/$3'; export PATH='ROOT/envs/$3/bin':\\"\\$PATH\\";"
        echo "echo activated"
    else
        echo "EnvironmentNameNotFound: Could not find conda environment: $3" >&2
        echo false
    fi ;;
"env list")
    printf '# conda environments:\\n#\\nbase                  *  ROOT\\n'
    printf 'train                    ROOT/envs/train\\n\\n' ;;
esac
"""


def environment(
    node: Node, home: Path, monkeypatch: pytest.MonkeyPatch, shell: tuple[str, ...] = ()
) -> dict[str, str]:
    """The environment of a server that was started so."""
    monkeypatch.setenv("HOME", str(home))
    # A node has our files in its home.
    monkeypatch.delenv("ORCHESTRATOR_HOME", raising=False)
    connection = ProcessConnection(shell, "")
    try:
        channel = open_channel(connection, node, SECONDS)
        text = "export SEEN=\"$(env -0 | tr '\\0\\n' '\\n ')\""
        answer = channel.ask(Hook(text=text, env={}, workdir="/"), SECONDS)
        return dict(line.partition("=")[::2] for line in answer.env["SEEN"].splitlines())
    finally:
        connection.close()


def refusal(node: Node, home: Path, monkeypatch: pytest.MonkeyPatch) -> NodeError:
    with pytest.raises(NodeError) as refused:
        environment(node, home, monkeypatch)
    return refused.value


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "its home"
    home.mkdir(mode=0o700)
    return home


def test_venv_is_activated(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(home / "venv", symlinks=True)
    env = environment(Node("n", activate="venv:~/venv"), home, monkeypatch)
    assert env["VIRTUAL_ENV"] == str(home / "venv")
    assert env["PATH"].startswith(f"{home}/venv/bin:")
    refused = refusal(Node("n", activate="venv:~/none"), home, monkeypatch)
    assert f"venv:~/none: there is no {home}/none/bin/python" in refused.what


def test_conda_environment_is_activated(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = home / "miniconda3"
    program(root / "bin/conda", CONDA.replace("ROOT", str(root)))
    venv.create(root / "envs/train", symlinks=True)
    (root / "envs/no-python").mkdir()
    monkeypatch.delenv("CONDA_EXE", raising=False)
    env = environment(Node("n", activate="conda:train"), home, monkeypatch)
    assert env["CONDA_PREFIX"] == f"{root}/envs/train"
    assert env["PATH"].startswith(f"{root}/envs/train/bin:")
    refused = refusal(Node("n", activate="conda:other"), home, monkeypatch)
    assert "there is no environment other; there are: base, train" in refused.what
    assert "EnvironmentNameNotFound" in refused.what
    refused = refusal(Node("n", activate="conda:no-python"), home, monkeypatch)
    assert "install python in it" in refused.what


def test_modules_are_loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = home / "modules/init/sh"
    init.parent.mkdir(parents=True)
    init.write_text(
        "module() {\n"
        "    shift\n"
        '    for m; do case $m in cuda*) export CUDA_HOME=/opt/cuda LOADEDMODULES="$m/12.1" ;;\n'
        "        lua*) printf '%s\\n' 'an error: unknown \"lua\"' '' 1 2 3 4 >&2; false ;;\n"
        "        *) echo \"ERROR: Unable to locate a modulefile for '$m'\" >&2 ;; esac; done\n"
        "}\n"
    )
    monkeypatch.setenv("MODULESHOME", str(home / "modules"))
    env = environment(Node("n", activate="module:cuda"), home, monkeypatch)
    assert env["CUDA_HOME"] == "/opt/cuda"
    refused = refusal(Node("n", activate="module:nccl/2.20, gcc"), home, monkeypatch)
    assert "nccl/2.20 cannot be loaded" in refused.what
    assert "Unable to locate a modulefile for 'gcc'" in refused.what
    refused = refusal(Node("n", activate="module:lua"), home, monkeypatch)
    assert '(an error: unknown "lua" / 1 / 2)' in refused.what, "Lmod goes on with advice"


@pytest.mark.parametrize("bash", [True, False], ids=["bash", "sh"])
def test_script_is_sourced(bash: bool, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not bash:
        tools = home / "tools"
        tools.mkdir()
        for name in ("sh", "python3", "env", "tr", "cat", "sleep"):
            real = os.path.realpath(sys.executable) if name == "python3" else shutil.which(name)
            (tools / name).symlink_to(real or name)
        monkeypatch.setenv("PATH", str(tools))
    script = home / "it's !mine.sh"
    node = Node("n", activate=f"script:{script}")
    script.write_text("read x; cat; echo noise; echo noise >&2; cd /; set -eu; export SET='a b'\n")
    env = environment(node, home, monkeypatch)
    assert env["SET"] == "a b"
    assert not [name for name in env if name.startswith("orch_")]
    for text, what in (
        ("echo out of luck >&2; exit 7", "exit code 7 (out of luck"),
        ("set -e; false", "exit code 1"),
        ("false", "ended with an error"),
    ):
        script.write_text(text)
        assert what in refusal(node, home, monkeypatch).what
    script.unlink()
    refused = refusal(node, home, monkeypatch)
    assert "there is no file" in refused.what
    assert shlex.split(refused.fix.partition("there: ")[2]) == [".", str(script)]


def test_endless_activation_times_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_command, "ACTIVATION_SECONDS", 1)
    os.mkfifo(home / "fifo")
    (home / "s.sh").write_text(f"echo waiting >&2; read x <'{home}/fifo'\n")
    refused = refusal(Node("n", activate="script:~/s.sh"), home, monkeypatch)
    assert "did not end within 1 s (waiting)" in refused.what


@pytest.mark.parametrize("shell", [*filter(shutil.which, ["bash", "dash", "zsh", "csh", "fish"])])
def test_activation_works_in_every_login_shell(
    shell: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = home / "login"
    program(login, f'#!/bin/sh\nexec {shell} -c "$3"\n')
    (home / "it's.sh").write_text("export SET=1")
    node = Node("n", activate=f"script:{home}/it's.sh", wrap='env "A=it\'s !1 \\\\ $HOME"')
    env = environment(node, home, monkeypatch, (str(login),))
    assert (env["SET"], env["A"]) == ("1", f"it's !1 \\ {home}")


@pytest.mark.parametrize("activate", [None, "script:/dev/null"])
@pytest.mark.parametrize(
    ("rc", "what"),
    [
        ("read x", "reads standard input"),
        # It reads a block, which could hold everything that we send.
        ("head -n1", "reads standard input"),
        ("python3 -c 'input()'", "reads standard input"),
        # A shell of another kind may say what it did not understand, with the words that are in it.
        ("echo 'print(\"input-was-taken\") ^ bad' >&2; exit 1", "ends before our program starts"),
        ("exec </dev/null", "reads standard input"),
        ("exec sh", "ends before our program starts"),
        ("exec csh -f", "ends before our program starts"),
        ("echo one >&2; echo two >&2; exit 3", "ends before our program starts: two"),
    ],
)
def test_rc_file_that_hijacks_command_is_refused(
    rc: str, what: str, activate: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = home / "tools"
    # ImageMagick has a program of this name.
    program(tools / "import", f"#!/bin/sh\ntouch '{home}/ran'\n")
    login = home / "login"
    program(login, f"#!/bin/sh\nPATH='{tools}':$PATH\n{rc}\neval \"$3\"\n")
    with pytest.raises(NodeError) as refused:
        environment(Node("n", activate=activate), home, monkeypatch, (str(login),))
    assert what in refused.value.what and "\n" not in refused.value.what + refused.value.fix
    assert not (home / "ran").exists()


CLOUD = """echo 'Please login as the user "ubuntu" rather than the user "root".'; echo; """


@pytest.mark.parametrize(
    ("rc", "what", "fix"),
    [
        (f"{CLOUD}cat >/dev/null", "it wants the user ubuntu", "write ubuntu@ before it"),
        (f"{CLOUD}exit 142", "it wants the user ubuntu", "write ubuntu@ before it"),
        (
            "echo 'waiting for /scratch'; cat >/dev/null",
            "fish? it says: waiting for /scratch",
            "slow",
        ),
        ("cat >/dev/null", "config.fish?", "slow"),
        ("cat", "config.fish?", "slow"),
        ("echo python-here /nfs/python; cat >/dev/null", "its Python, /nfs/python, takes", "slow"),
    ],
)
def test_output_of_hanging_login_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch, rc: str, what: str, fix: str
) -> None:
    """A cloud's machine that names another user waits for ten seconds, as long as we do."""
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 1.0)
    login = home / "login"
    program(login, f'#!/bin/sh\n{rc}\neval "$3"\n')
    with pytest.raises(NodeError) as refused:
        environment(Node("n"), home, monkeypatch, (str(login),))
    assert what in refused.value.what and fix in refused.value.fix
    assert refused.value.what.endswith(what) or "user" in what or "Python" in what


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a disk")
def test_server_runs_with_read_only_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of our last session are enough to see the running processes and to end them."""
    environment(Node("n"), home, monkeypatch)
    own = r'mount --bind "$HOME" "$HOME" && mount -o remount,bind,ro "$HOME" && touch "$HOME/x"'
    around = f"unshare -m sh -c '{own} 2>/dev/null || exec \"$@\"' sh"
    assert environment(Node("n", wrap=around), home, monkeypatch)["HOME"] == str(home)
    assert not (home / "x").exists()


def test_new_edition_removes_editions_unused_for_week(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, recent = (home / ".orchestrator/lib" / (digit * 16) for digit in "01")
    for path in (old, recent):
        path.mkdir(parents=True)
    os.utime(old, (1, 1))
    environment(Node("n"), home, monkeypatch)
    # The removal follows once the head has left.
    wait_until(lambda: not old.exists(), "its removal")
    assert recent.exists()


def test_wrap_surrounds_whole_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = home / "inside"
    inside.mkdir(mode=0o700)
    around = f"env HOME='{inside}'"
    if not os.geteuid() and not subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        around = f"unshare -m {around}"
    (inside / "s.sh").write_text("export SET=1")
    env = environment(Node("n", activate="script:~/s.sh", wrap=around), home, monkeypatch)
    assert (env["HOME"], env["SET"]) == (str(inside), "1")
    assert not (home / ".orchestrator").exists()
    refused = refusal(Node("n", wrap="env -C /no/such"), home, monkeypatch)
    assert "`env -C /no/such` ends before our program starts: env: " in refused.what
    deaf = Node("n", wrap="sh -c 'exec \"$@\" </dev/null' sh")
    assert "needs -i" in refusal(deaf, home, monkeypatch).fix


@pytest.mark.parametrize(
    "text",
    ["venv", "venv:", "venv:relative", "conda:", "conda:-n", "module:", "module:a,,-b", "x:/a"],
)
def test_check_refuses_unknown_activation(text: str) -> None:
    with pytest.raises(Exception, match="not a known form of activation"):
        check_environment(text, None)


@pytest.mark.parametrize(
    "text", ["venv:~/a b", "conda:base", "conda:/opt/x", "module:a/1.2,b c", "script:/a", "none"]
)
def test_check_accepts_known_activation(text: str) -> None:
    check_environment(text, "docker exec -i x")
