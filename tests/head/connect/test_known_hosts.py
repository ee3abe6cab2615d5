"""ssh-keygen -F says which lines of a known_hosts file OpenSSH itself reads for a host."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orchestrator.head.connect import fabric_login
from orchestrator.head.connect.known_hosts import KnownFile, lines_about
from orchestrator.head.connect.ssh_config import Destination

OURS, OTHER = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()
ANOTHER_KIND = paramiko.ECDSAKey.generate(bits=384)


def line(names: str, key: paramiko.PKey = OURS) -> str:
    return f"{names} {key.get_name()} {key.get_base64()}\n"


def hashed(name: str) -> str:
    return paramiko.HostKeys.hash_host(name)


@pytest.fixture
def known_hosts(tmp_path: Path) -> Path:
    return tmp_path / "ssh" / "known_hosts"


def destination(known_hosts: Path, host: str = "gpu01", port: int = 22) -> Destination:
    return Destination(host, "bob", port, (), user_known_hosts=(known_hosts,))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


# -- which lines speak of a host --------------------------------------------------------------


def of_openssh(path: Path, name: str) -> set[int]:
    """Return the numbers of the lines that OpenSSH finds for a host."""
    words = ["ssh-keygen", "-F", name, "-f", str(path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    return {int(found) for found in re.findall(r"^# Host .* found: line (\d+)", done.stdout, re.M)}


def compare(path: Path, host: str, port: int) -> None:
    """Compare ours with OpenSSH's: plain and hashed lines are read alike.

    A line with a pattern or a marker is found wherever OpenSSH finds it, and perhaps elsewhere: it
    sends the host to ssh, which judges it.
    """
    there = destination(path, host, port)
    found = KnownFile(path.read_text(), path).about(there.listed_name)
    ours = {int(line.where.rpartition(":")[2]): line for line in found}
    theirs = of_openssh(path, there.listed_name)
    assert theirs <= ours.keys()
    assert all(ours[number].needs_ssh for number in ours.keys() - theirs)


PATTERNS = [
    *("gpu01", "GPU01", "gpu02", "gpu01,10.0.0.1", "10.0.0.1,gpu01", "gpu0", "gpu011", "*"),
    *("gpu*", "gpu0?", "gpu0[12]", "?????", "*.lan", "g*1", "*,!gpu01", "!gpu01,*", "!gpu02,*"),
    *("!GPU*,*", "!gpu01", "[gpu01]:2222", "[gpu01]:22", "[gpu*]:2222", "[*]:*", "[gpu01]:*"),
    *("*,![gpu01]:2222", "![GPU01]:2222,*", "2001:db8::1", "[2001:db8::1]:2222", "fe80::1%eth0"),
    *("|1|", "|1|x|y", "|2|aaaa|bbbb", f"|1|{'A' * 27}=|{'B' * 27}=", "gpu01,", ",gpu01"),
]  # fmt: skip
HOSTS = [("gpu01", 22), ("gpu01", 2222), ("GPU01", 22), ("2001:db8::1", 22), ("2001:db8::1", 2222)]

needs_openssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen")


@needs_openssh
@pytest.mark.parametrize(("host", "port"), HOSTS)
def test_lines_about_agrees_with_openssh(known_hosts: Path, host: str, port: int) -> None:
    names = [*PATTERNS, hashed("gpu01"), hashed("[gpu01]:2222"), hashed("other")]
    lines = [line(name) for name in names]
    lines += [f"{marker} {line}" for marker in ("@revoked", "@cert-authority") for line in lines]
    path = write(known_hosts, "".join(lines))
    compare(path, host, port)


patterns = st.lists(st.text("ab*?!.[]:2", min_size=1, max_size=6), min_size=1, max_size=3)


@needs_openssh
@given(st.lists(patterns, min_size=1, max_size=20), st.sampled_from(["ab", "a.b", "b2"]))
@example([["!ab", "*"], ["*", "!a*"], ["[ab]:2"]], "ab")
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_patterns_agree_with_openssh(known_hosts: Path, lists: list[list[str]], host: str) -> None:
    path = write(known_hosts, "".join(line(",".join(names)) for names in lists))
    for port in (22, 2):
        compare(path, host, port)


def test_lines_about_skips_lines_without_key(known_hosts: Path) -> None:
    text = "# gpu01 comment\n\n   \ngpu01\ngpu01 ssh-rsa\ngpu01 ssh-rsa !!!\n\t " + line("gpu01")
    text += "@cert-authority " + line("gpu01") + "@revoked " + line("gpu01", OTHER) + "\0\xff\n"
    found = lines_about(destination(write(known_hosts, text)))
    assert [key.blob for key in found] == [OURS.asbytes(), OURS.asbytes(), OTHER.asbytes()]
    assert [key.marker for key in found] == ["", "@cert-authority", "@revoked"]


def test_lines_about_rereads_changed_file(known_hosts: Path) -> None:
    there = destination(write(known_hosts, line("other")))
    assert not lines_about(there)
    with known_hosts.open("a") as file:
        file.write(line("gpu01"))
    assert [known.where for known in lines_about(there)] == [f"{known_hosts}:2"]


@pytest.mark.parametrize(
    "text",
    [
        line("gpu01"),
        line(hashed("gpu01")),
        line("gpu01", ANOTHER_KIND) + line("gpu01"),
        line("gpu01").rstrip("\n"),
    ],
    ids=["plain", "hashed", "two kinds", "no last newline"],
)
def test_prepared_client_has_known_keys(known_hosts: Path, text: str) -> None:
    there = destination(write(known_hosts, text))
    connection = fabric_login.prepare_connection(there, False)
    assert connection.client.get_host_keys().check("gpu01", OURS)
    assert known_hosts.read_text() == text


def test_lines_about_reads_global_file(known_hosts: Path, tmp_path: Path) -> None:
    system = write(tmp_path / "system" / "known_hosts", line("gpu01"))
    there = replace(destination(known_hosts), global_known_hosts=(system,))
    assert [known.where for known in lines_about(there)] == [f"{system}:1"]
