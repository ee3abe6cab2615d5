import getpass
import itertools
import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.connect import ssh_config
from orchestrator.head.connect.ssh_config import Destination, SshConfig
from orchestrator.head.nodes.node_list import parse_nodes
from tests.head.connect.reading import read_again

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh to ask")

HOME = Path.home()
# Ssh does not read $HOME.
SSH_HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)
ME = getpass.getuser()
counter = itertools.count()


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    read_again()


def config(directory: Path, text: str) -> SshConfig:
    path = directory / f"config{next(counter)}"
    path.write_text(text)
    return SshConfig(path)


def reach(directory: Path, text: str, node: str) -> Destination:
    """How the first node of a list is reached."""
    return config(directory, text).of_node(parse_nodes(node, "list")[0])


# -- what is read -----------------------------------------------------------------------------


def test_empty_config_gives_defaults(tmp_path: Path) -> None:
    there = reach(tmp_path, "", "gpu01")
    assert (there.host, there.alias, there.user, there.port) == ("gpu01", "", ME, 22)
    assert {HOME / ".ssh/id_ed25519", HOME / ".ssh/id_rsa"} <= set(there.keys)
    assert there.user_known_hosts[0] == SSH_HOME / ".ssh/known_hosts"
    assert Path("/etc/ssh/ssh_known_hosts") in there.global_known_hosts
    assert (there.jump, there.control_path, there.only_these_keys) == ("", "", False)


def test_node_list_overrides_config(tmp_path: Path) -> None:
    text = "User config\nPort 1000\n"
    there = reach(tmp_path, text, "gpu01")
    assert (there.user, there.port) == ("config", 1000)
    there = reach(tmp_path, text, "list@gpu01:2222")
    assert (there.user, there.port) == ("list", 2222)


def test_alias_is_resolved(tmp_path: Path) -> None:
    text = "Host big\n  HostName 10.0.0.7\n  User bob\n  Port 2200\nHost *\n  User other\n"
    there = reach(tmp_path, text, "big")
    assert (there.host, there.alias, there.user, there.port) == ("10.0.0.7", "", "bob", 2200)
    assert reach(tmp_path, text, "small").user == "other"


def test_host_name_without_block_applies_to_all(tmp_path: Path) -> None:
    assert reach(tmp_path, "HostName 10.0.0.7\n", "gpu01").host == "10.0.0.7"
    assert reach(tmp_path, "HostName %h.lan\n", "gpu01").host == "gpu01.lan"


@pytest.mark.parametrize(
    ("text", "node", "port"),
    [
        ("Match user bob\n  Port 77\n", "bob@gpu01", 77),
        ("Match user bob\n  Port 77\n", "gpu01", 22),
        ("User bob\nMatch user bob\n  Port 77\n", "gpu01", 77),
        ("Match host gpu0?\n  Port 77\n", "gpu01", 77),
        ("Match originalhost a exec true\n  Port 77\n", "a", 77),
        ("Match exec false\n  Port 77\n", "a", 22),
        ("Host gpu* !gpu02\n  Port 77\n", "gpu01", 77),
        ("Host gpu* !gpu02\n  Port 77\n", "gpu02", 22),
        ("hOsT=gpu01\n  pOrT=77\n", "gpu01", 77),
    ],
)
def test_blocks_are_matched(tmp_path: Path, text: str, node: str, port: int) -> None:
    assert reach(tmp_path, text, node).port == port


def test_includes_are_read(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text("Host gpu01\n  Port 77\n")
    (tmp_path / "all").write_text("User everyone\n")
    for pattern in ("inner all", "*"):
        names = " ".join(f"{tmp_path}/{name}" for name in pattern.split())
        there = reach(tmp_path / "..", f"Include {names}\n", "gpu01")
        assert (there.port, there.user) == (77, "everyone")
        assert reach(tmp_path / "..", f"Include {names}\n", "gpu02").port == 22


def test_tokens_are_kept_for_ssh(tmp_path: Path) -> None:
    """They are left as they stand, and way.choose_way sends the host to ssh."""
    text = "IdentityFile ~/.ssh/id_%n\nProxyCommand nc -x %r@%h:%p %n %%\n"
    there = reach(tmp_path, text, "bob@gpu01:22")
    assert there.keys == (HOME / ".ssh/id_%n",)
    assert there.settings["proxycommand"] == ("nc -x %r@%h:%p %n %%",)


@pytest.mark.parametrize(
    ("jump", "hop"),
    [
        ("bob@jump:2222", ("bob", "jump", 2222)),
        ("other,jump", (ME, "jump", 22)),
        ("[::1]", (ME, "::1", 22)),
        ("bob@[fe80::1%eth0]", ("bob", "fe80::1%eth0", 22)),
        ("a,bob@[2001:db8::1]:2222", ("bob", "2001:db8::1", 2222)),
    ],
)
def test_last_hop_is_resolved(tmp_path: Path, jump: str, hop: tuple[str, str, int]) -> None:
    (tmp_path / "config").write_text("")
    last = SshConfig(tmp_path / "config").last_hop(jump)
    assert (last.user, last.host, last.port) == hop


@pytest.mark.parametrize("jump", ["", "bob@", "[::1", "::1", "jump:ssh", "[::1]:"])
def test_last_hop_refuses_invalid_host(tmp_path: Path, jump: str) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        SshConfig(tmp_path / "config").last_hop(jump)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("ProxyJump bob@jump:2222,other", "jump", "bob@jump:2222,other"),
        ("ProxyJump none", "jump", ""),
        ("IdentitiesOnly yes", "only_these_keys", True),
        ("HostKeyAlias One", "alias", "one"),
        ("StrictHostKeyChecking no", "checking", "false"),
        ("StrictHostKeyChecking accept-new", "checking", "accept-new"),
        ("StrictHostKeyChecking yes", "checking", "true"),
        ("UserKnownHostsFile /dev/null", "user_known_hosts", (Path("/dev/null"),)),
        ("UserKnownHostsFile none", "user_known_hosts", ()),
        ('IdentityFile "/my keys/id"', "keys", (Path("/my keys/id"),)),
        ("ControlPath ~/%n-%r", "control_path", str(SSH_HOME / f"gpu01-{ME}")),
        ("ControlPath none", "control_path", ""),
        ("HostName 10.0.0.7", "name", "gpu01"),
    ],
)
@pytest.mark.parametrize("block", ["", "Host gpu01\n  "])
def test_options_are_honoured(
    tmp_path: Path, block: str, line: str, field: str, value: object
) -> None:
    assert getattr(reach(tmp_path, f"{block}{line}\n", "gpu01"), field) == value


@pytest.mark.parametrize(
    ("line", "keyword", "value"),
    [
        ("ProxyCommand nc %h", "proxycommand", "nc %h"),
        ("AddressFamily inet", "addressfamily", "inet"),
        ("HashKnownHosts yes", "hashknownhosts", "yes"),
        ("IdentityAgent none", "identityagent", "none"),
        ("CheckHostIP yes", "checkhostip", "yes"),
        ("HostbasedAuthentication yes", "hostbasedauthentication", "yes"),
        ("PKCS11Provider /usr/lib/x.so", "pkcs11provider", "/usr/lib/x.so"),
    ],
)
@pytest.mark.parametrize("block", ["", "Host gpu01\n  "])
def test_options_that_choose_program_are_kept(
    tmp_path: Path, block: str, line: str, keyword: str, value: str
) -> None:
    assert reach(tmp_path, f"{block}{line}\n", "gpu01").settings[keyword] == (value,)


@pytest.mark.parametrize("host", ["2001:db8::1", "fe80::1%eth0", "10.0.0.1", "a_b-c.d"])
def test_destination_accepts_any_host_name(tmp_path: Path, host: str) -> None:
    for text in ("", "Host x\n  Port 1\n"):
        assert reach(tmp_path, text, host).host == host


@pytest.mark.parametrize(
    ("text", "words"), [("Nonsense 1\n", "bad configuration option"), ("Port x\n", "port")]
)
def test_config_refused_by_ssh_is_explained(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match="ssh cannot read its configuration") as refused:
        reach(tmp_path, text, "gpu01")
    assert words in refused.value.what.lower() and "\n" not in refused.value.what
    assert ("IgnoreUnknown" in refused.value.fix) == ("bad configuration option" in words)


def test_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        SshConfig(tmp_path / "none").destination("gpu01")


def test_config_without_ssh_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_config.shutil, "which", lambda _: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh_config, "SYSTEM_CONFIG", tmp_path / "none")
    there = SshConfig().destination("gpu01")
    assert (there.host, there.port, there.user) == ("gpu01", 22, ME)
    assert there.keys[0] == tmp_path / ".ssh/id_ed25519"
    assert there.user_known_hosts == (tmp_path / ".ssh/known_hosts",)
    read_again()
    with pytest.raises(UsageError, match="not installed"):
        reach(tmp_path, "", "gpu01")


# -- one question for all nodes ---------------------------------------------------------------


def test_many_nodes_need_one_ssh_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = ssh_config.ask_ssh

    def count(file: Path | None, host: str, *who: object) -> dict[str, list[str]]:
        asked.append(host)
        return ask(file, host)

    monkeypatch.setattr(ssh_config, "ask_ssh", count)
    plain = config(tmp_path, "# 100%\nHost *\n  User bob\n  IdentityFile ~/.ssh/id_cluster\n")
    assert {plain.destination(f"gpu{n}").user for n in range(64)} == {"bob"}
    assert len(asked) == 1
    blocks = config(tmp_path, "Host gpu1\n  User bob\n")
    assert [blocks.destination(f"gpu{n}").user for n in range(3)] == [ME, "bob", ME]
    assert len(asked) == 4
