"""Files go from node to node: to those that have the token, while they come."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.node.transfer import passing
from orchestrator.node.transfer.code.store import Store, ToStore
from orchestrator.node.transfer.directory import TargetDirectory
from orchestrator.node.transfer.passing import Giver, Taking
from orchestrator.node.transfer.receive import IncomingFiles
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import FILE, Entry
from orchestrator.protocol.requests.transfer import FilePart, GivingNode

TOKEN = secrets.token_hex(32)
SECONDS = 20.0
MOMENT = 1_700_000_000_000_000_000
CONTENTS = {
    b"empty": b"",
    b"large": os.urandom(700_000),
    **{b"many/%d" % number: b"%d" % number for number in range(300)},
}


def sum_of(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


ENTRIES = tuple(
    Entry(path, FILE, 0o644, len(content), sum_of(content))
    for path, content in sorted(CONTENTS.items())
)
LISTING = manifest.packed(ENTRIES)


@pytest.fixture
def giving() -> Iterator[list[Giver]]:
    givers: list[Giver] = []
    yield givers
    for giver in givers:
        giver.close()


def start(giving: list[Giver], files: IncomingFiles) -> GivingNode:
    giving.append(Giver(TOKEN, lambda: files))
    return GivingNode(addresses=("127.0.0.1",), port=giving[-1].port, token=TOKEN)


def incoming(path: Path, monkeypatch: pytest.MonkeyPatch) -> ToStore:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(path))
    store = Store()
    store.prepare()
    return ToStore(store, ENTRIES, LISTING)


def take_all(place: IncomingFiles, giver: GivingNode) -> Taking:
    place.compare()
    return Taking(place, giver)


def end_of(taking: Taking) -> str:
    assert taking.over.wait(SECONDS)
    return taking.problem


def put(place: IncomingFiles, path: bytes, content: bytes) -> None:
    number = [entry.path for entry in ENTRIES].index(path)
    if number in place.missing:
        place.put(FilePart(number, 0, len(content)), memoryview(content))


def test_files_go_down_a_chain_while_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, giving: list[Giver]
) -> None:
    places = [incoming(tmp_path / str(number), monkeypatch) for number in range(3)]
    places[0].compare()
    takings = [take_all(there, start(giving, here)) for here, there in itertools.pairwise(places)]
    for path in (b"large", b"empty"):
        put(places[0], path, CONTENTS[path])
    assert not any(taking.over.is_set() for taking in takings)
    deadline = time.monotonic() + SECONDS
    while takings[1].size < 700_000 and time.monotonic() < deadline:
        takings[1].over.wait(0.01)
    assert takings[1].size == 700_000  # the last of the chain has it before the first has all
    for path, content in CONTENTS.items():
        put(places[0], path, content)
    assert [end_of(taking) for taking in takings] == ["", ""]
    for place in places:
        assert place.store.lacking(ENTRIES) == []
    again = take_all(places[2], start(giving, places[0]))
    assert (end_of(again), again.size) == ("", 0)


def test_what_is_false_does_not_enter_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, giving: list[Giver]
) -> None:
    """A content that rotted there, and one that is not there any more."""
    there, place = (incoming(tmp_path / str(number), monkeypatch) for number in range(2))
    there.compare()
    for path, content in CONTENTS.items():
        put(there, path, content)
    (rotten,) = (entry for entry in ENTRIES if entry.path == b"many/200")
    Path(os.fsdecode(there.store.path_of(rotten))).write_bytes(b"002")
    taking = take_all(place, start(giving, there))
    assert end_of(taking) == "many/200 came with another content"
    assert [ENTRIES[at].path for at in place.store.lacking(ENTRIES)] == [b"many/200"]
    there.failed[5] = "it could not be written"
    again = take_all(incoming(tmp_path / "3", monkeypatch), start(giving, there))
    assert end_of(again) == f"it has no {os.fsdecode(ENTRIES[5].path)}"


# -- files of a directory ---------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name in ("shard/1", "top", "secret"):
        path = tmp_path / "shards" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        os.utime(path, ns=(MOMENT, MOMENT))
    return tmp_path / "shards"


def of_shards(root: Path) -> IncomingFiles:
    names = (b"shard/1", b"top")
    entries = [Entry(name, FILE, 0o644, len(name), b"", MOMENT) for name in names]
    return TargetDirectory(root, entries, 0o022, private=True)


def test_files_go_into_a_private_directory(
    tmp_path: Path, shards: Path, giving: list[Giver]
) -> None:
    target = tmp_path / "target"
    for came in (10, 0):
        taking = take_all(of_shards(target), start(giving, of_shards(shards)))
        assert (end_of(taking), taking.size) == ("", came)
    found = {str(path.relative_to(target)): path for path in target.rglob("*")}
    assert set(found) == {"shard", "shard/1", "top"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in found.values())


@pytest.mark.parametrize("how", ["changed", "a link"])
def test_only_the_files_of_the_manifest_are_given(
    tmp_path: Path, shards: Path, giving: list[Giver], how: str
) -> None:
    (shards / "top").unlink()
    if how == "changed":
        (shards / "top").write_text("pot")
    else:
        (shards / "top").symlink_to("secret")
    taking = take_all(of_shards(tmp_path / "target"), start(giving, of_shards(shards)))
    assert end_of(taking) == "it has no top"
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["shard"]
    for wrong in (b"[-1]", b"[2]", b'["../secret"]', b"x"):
        sock = socket.create_connection(("127.0.0.1", giving[0].port))
        with sock, passing.opened(sock, TOKEN, called=False) as line:
            line.send_bytes(wrong)
            with contextlib.suppress(EOFError, ConnectionError):
                assert line.recv_bytes() == passing.ABSENT


# -- who may, and when it does not go on ----------------------------------------------------------


def test_without_the_token_nothing_is_given_or_taken(
    tmp_path: Path, shards: Path, giving: list[Giver]
) -> None:
    giver = start(giving, of_shards(shards)).replace(token=secrets.token_hex(32))
    taking = take_all(of_shards(tmp_path / "target"), giver)
    assert "hung up" in end_of(taking) or "token" in taking.problem
    assert taking.size == 0
    with socket.create_connection(("127.0.0.1", giving[0].port)) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        heard = b"".join(iter(lambda: received(line), b""))
    assert b"shard" not in heard


def received(line: socket.socket) -> bytes:
    try:
        return line.recv(100)
    except ConnectionResetError:
        return b""


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_nodes_without_ipv4_give_and_take(
    tmp_path: Path, shards: Path, giving: list[Giver]
) -> None:
    giver = start(giving, of_shards(shards)).replace(addresses=("255.255.255.255", "::1"))
    assert end_of(take_all(of_shards(tmp_path / "target"), giver)) == ""


def test_a_giver_that_is_silent_is_given_up_and_one_that_waits_is_not(
    tmp_path: Path, shards: Path, giving: list[Giver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "QUIET_SECONDS", 1)
    there = of_shards(shards)
    there.missing = {1}
    waiting = take_all(of_shards(tmp_path / "target"), start(giving, there))
    assert not waiting.over.wait(2.5)
    giving[0].close()
    assert "hung up" in end_of(waiting)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        giver = GivingNode(addresses=("127.0.0.1",), port=silent.getsockname()[1], token=TOKEN)
        assert "silent for 1 s" in end_of(take_all(of_shards(tmp_path / "other"), giver))
    assert "refused" in end_of(take_all(of_shards(tmp_path / "other"), giver))
