"""The command line of the system's ssh, as ssh itself reads it."""

import subprocess
from pathlib import Path

from orchestrator.head.exec.execution import ssh_command
from orchestrator.head.nodes.node_list import Node, NumberedNode


def test_ssh_command_overrides_remote_command_of_config(tmp_path: Path) -> None:
    """A RemoteCommand (`tmux attach`) is for people who type `ssh gpu01`."""
    config = tmp_path / "config"
    config.write_text("Host *\n  RemoteCommand tmux attach\n  RequestTTY force\n")
    node = NumberedNode(0, Node("gpu01"))
    words = ssh_command(node, "hostname", config=config, timeout=10.0, strict=False, terminal=False)
    done = subprocess.run([words[0], "-G", *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "requesttty false" in done.stdout.splitlines()
