"""A head needs nothing that Linux alone has: a Mac gets one line, and goes on."""

import subprocess
import sys
from pathlib import Path

from tests.launching import Head

PROGRAM = str(Path(__file__).with_name("elsewhere.py"))
ROOT = str(Path(__file__).parents[2])


def typed(head: Head, *words: str) -> str:
    """Return what a command prints on such a machine."""
    where = ["--nodes", str(head.node_list), "--ssh-config", str(head.cluster.ssh_config)]
    first = 1 if words[0] == "master_launch" else 2
    done = subprocess.run(
        [sys.executable, PROGRAM, *words[:first], *where, *words[first:]],
        cwd=head.directory,
        env={"PATH": "/usr/bin:/bin", "HOME": str(head.directory.parent), "PYTHONPATH": ROOT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("orchestrator: as a head, darwin is untested here\n")
    return done.stdout


def test_commands_work_without_linux_only_calls(head: Head) -> None:
    (head.directory / "train.py").write_text("print('hello from a rank', flush=True)\n")
    assert typed(head, "main", "exec", "--", "echo", "there").count("there") == 2
    assert "done after" in typed(head, "master_launch", "--no-torchrun", "train.py")
    assert "hello from a rank" in typed(head, "main", "logs")
    typed(head, "master_launch", "--detach", "--no-torchrun", "sleep", "600")
    assert "running" in typed(head, "main", "status")
    assert typed(head, "main", "stop", "--now").count("nothing left") == 2
    assert "stopped" in typed(head, "main", "ls")
