"""The machines that ssh knows, and what an answer of the user names among them."""

from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.init.offers import KnownMachine, chosen_nodes, find_offers

CONFIG = """
Include {directory}/more
Host gpu1 gpu2 *.lab !gpu9 "quoted name"
    HostName 10.0.0.1
    UserKnownHostsFile {directory}/none
Host *
    UserKnownHostsFile {directory}/known
"""
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVwHjbSXXIyaHlRvvHfF3nJ0Oj1k9p3mIY3X9l1q0mC"
KNOWN = f"""
10.0.0.1 {KEY}
node7,10.0.0.7 {KEY}
[10.0.0.8]:2222 {KEY}
|1|c2FsdA==|ZGlnZXN0 {KEY}
*.lab {KEY}
@revoked gone {KEY}
"""


def test_find_offers_reads_ssh_config_and_known_hosts(tmp_path: Path) -> None:
    """An alias stands for its address; patterns and hashed names stand for no machine."""
    (tmp_path / "config").write_text(CONFIG.format(directory=tmp_path))
    (tmp_path / "more").write_text("Host = inner\n")
    (tmp_path / "known").write_text(KNOWN)
    assert find_offers(SshConfig(tmp_path / "config")) == [
        *(KnownMachine(name, "ssh_config") for name in ("inner", "gpu1", "gpu2")),
        *(KnownMachine(name, "known_hosts") for name in ("node7", "10.0.0.8:2222")),
    ]


OFFERS = [KnownMachine("gpu1", ""), KnownMachine("gpu2", ""), KnownMachine("10.0.0.8:2222", "")]


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("2 1", ["gpu2", "gpu1"]),
        ("2-3, ada@gpu[07,08]", ["gpu2", "10.0.0.8:2222", "ada@gpu07", "ada@gpu08"]),
        ("1,1 gpu1", ["gpu1"]),
        ("4", "4 is not a number from 1 to 3"),
        ("2-1", "2-1 is not a number"),
        ("-oProxyCommand=x", "is not a host name"),
    ],
)
def test_chosen_takes_numbers_and_hosts(answer: str, names: list[str] | str) -> None:
    if isinstance(names, list):
        assert [node.name for node in chosen_nodes(answer, OFFERS)] == names
        return
    with pytest.raises(UsageError, match=names):
        chosen_nodes(answer, OFFERS)
