"""Files go from node to node: to whoever has the token, while they come, and each checked."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from orchestrator.node.peers.signed_connection import Broken
from orchestrator.node.transfer import give, take
from orchestrator.node.transfer import wire as wires
from orchestrator.node.transfer.code.store import Store, ToStore
from orchestrator.node.transfer.directory import TargetDirectory
from orchestrator.node.transfer.give import Giver
from orchestrator.node.transfer.receive import IncomingFiles
from orchestrator.node.transfer.take import Taking
from orchestrator.node.transfer.wire import NodeWire
from orchestrator.protocol import frames, manifest
from orchestrator.protocol.manifest import FILE, Entry
from orchestrator.protocol.requests.transfer import FilePart, GivingNode

TOKEN = secrets.token_hex(32)
SECONDS = 20.0
CONTENTS = {
    b"empty": b"",
    b"large": os.urandom(700_000),
    **{b"many/%d" % number: b"%d" % number for number in range(600)},
    b"zero": b"",
}


def sum_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


ENTRIES = tuple(
    Entry(path, FILE, 0o644, len(content), sum_of(content).encode())
    for path, content in sorted(CONTENTS.items())
)
LISTING = manifest.packed(ENTRIES)
DIGEST = manifest.digest_of(LISTING)


@pytest.fixture
def giving() -> Iterator[list[Giver]]:
    givers: list[Giver] = []
    yield givers
    for giver in givers:
        giver.close()


def start(giving: list[Giver], files: Any, seconds: float = SECONDS) -> GivingNode:
    giving.append(Giver(TOKEN, lambda: files, seconds))
    return GivingNode(addresses=("127.0.0.1",), port=giving[-1].port, token=TOKEN)


def new_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(path))
    store = Store()
    store.prepare()
    return store


def end_of(taking: Taking) -> str:
    assert taking.over.wait(SECONDS)
    return taking.problem


# -- a manifest -------------------------------------------------------------------------------


def incoming(store: Store) -> IncomingFiles:
    return IncomingFiles(ToStore(store, ENTRIES, LISTING))


def take_all(place: IncomingFiles, giver: GivingNode) -> Taking:
    place.compare()
    return Taking(place, giver)


def put(place: IncomingFiles, path: bytes, content: bytes) -> None:
    number = [entry.path for entry in ENTRIES].index(path)
    if number in place.missing:
        place.put(FilePart(number, 0, len(content)), memoryview(content))


def test_files_go_down_a_chain_while_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, giving: list[Giver]
) -> None:
    places = [incoming(new_store(tmp_path / str(number), monkeypatch)) for number in range(3)]
    takings = [take_all(there, start(giving, here)) for here, there in itertools.pairwise(places)]
    places[0].compare()
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
    size = sum(map(len, set(CONTENTS.values())))
    assert [taking.size for taking in takings] == [size] * 2
    for place in places:
        store = place.target.store  # type: ignore[attr-defined]
        assert store.lacking(store.tree(DIGEST)) == []
        assert not list(Path(os.fsdecode(store.objects)).glob(".new*"))
    again = take_all(places[2], start(giving, places[0]))
    progress = again.progress(SECONDS)
    assert (progress.problem, progress.size) == ("", 0)
    assert not places[2].missing


def filled(place: IncomingFiles) -> IncomingFiles:
    place.compare()
    for path, content in CONTENTS.items():
        put(place, path, content)
    return place


def test_what_is_false_does_not_enter_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, giving: list[Giver]
) -> None:
    """A content that rotted there, and one that is not there any more."""
    stores = [new_store(tmp_path / str(number), monkeypatch) for number in range(2)]
    there = filled(incoming(stores[0]))
    (rotten,) = (entry for entry in ENTRIES if entry.path == b"many/300")
    Path(os.fsdecode(stores[0].path_of(rotten))).write_bytes(b"003")
    place = incoming(stores[1])
    taking = take_all(place, start(giving, there))
    assert end_of(taking) == "many/300 came with another content"
    assert [ENTRIES[at].path for at in stores[1].lacking(ENTRIES)] == [b"many/300"]
    there.failed[5] = "it could not be written"
    again = take_all(incoming(new_store(tmp_path / "3", monkeypatch)), start(giving, there))
    assert end_of(again) == f"it has no {os.fsdecode(ENTRIES[5].path)}"


# -- who may ----------------------------------------------------------------------------------


LATE, ABSENT = 1, 2


class Words:
    """One file that is there, one that never comes, and one that there is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_bytes(b"words")
        self.opened: list[int] = []

    def open(self, number: int) -> BinaryIO | None:
        self.opened.append(number)
        if number == ABSENT:
            raise LookupError(number)
        return None if number == LATE else self.path.open("rb")

    def size(self, number: int) -> int:
        return 5

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.05))


def fetch(wire: NodeWire, *wanted: tuple[int, int]) -> bytes:
    """Fetch files by number and size; return what came of them."""
    wire.send({"files": [number for number, _ in wanted]})
    got, size = bytearray(), sum(size for _, size in wanted)
    while len(got) < size:
        piece = wire.receive()
        if isinstance(piece, dict):
            raise Broken(f"it has no {piece['absent']}")
        got += piece
    return bytes(got)


def test_who_has_not_the_token_gets_nothing(tmp_path: Path, giving: list[Giver]) -> None:
    words = Words(tmp_path / "words")
    giver = start(giving, words)
    with pytest.raises(Broken, match=r"hung up|reset"):
        take.call(giver.replace(token=secrets.token_hex(32)))
    with socket.create_connection(("127.0.0.1", giver.port)) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        heard = b""
        while data := _received(line):
            heard += data
    assert len(heard) == 32  # a random number
    assert words.opened == []
    mirror = take.call(giver)
    mirror.send(b"no question")
    with pytest.raises(Broken):
        mirror.receive()
    known = take.call(giver)
    assert fetch(known, (0, 5)) == b"words"
    with pytest.raises(Broken, match="it has no 2"):
        fetch(known, (ABSENT, 5))


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(100)
    except ConnectionResetError:
        return b""


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_nodes_without_ipv4_give_and_take(tmp_path: Path, giving: list[Giver]) -> None:
    giver = start(giving, Words(tmp_path / "words")).replace(addresses=("::1",))
    assert fetch(take.call(giver), (0, 5)) == b"words"


def test_a_listener_that_has_not_the_token_is_no_giver(giving: list[Giver]) -> None:
    """It could send anything: nothing of it is believed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        giver = GivingNode(addresses=("127.0.0.1",), port=answering(server), token=TOKEN)
        with pytest.raises(Broken, match="not one of us"):
            take.call(giver)


def answering(server: socket.socket) -> int:
    def answer() -> None:
        connection, _ = server.accept()
        connection.sendall(b"0" * 32 + frames.header(frames.JSON, 34) + bytes(32) + b"{}")
        with connection:
            while connection.recv(100):
                pass

    threading.Thread(target=answer, daemon=True).start()
    port: int = server.getsockname()[1]
    return port


def test_contents_that_are_changed_on_the_way_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, giving: list[Giver]
) -> None:
    """A machine between both nodes sees everything, and can sign nothing."""
    stores = [new_store(tmp_path / str(number), monkeypatch) for number in range(2)]
    real = start(giving, filled(incoming(stores[0])))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=forge, args=(server, real.port), daemon=True).start()
        taking = take_all(incoming(stores[1]), real.replace(port=server.getsockname()[1]))
        assert end_of(taking) == "not one of us"
    assert b"large" in [ENTRIES[at].path for at in stores[1].lacking(ENTRIES)]


def forge(server: socket.socket, port: int) -> None:
    """Carry between a caller and the real one, and change a byte amid the large file."""
    caller, _ = server.accept()
    giver = socket.create_connection(("127.0.0.1", port))

    def carry(to: socket.socket, come: socket.socket, damaged: int = -1) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while data := bytearray(come.recv(1 << 20)):
                if at <= damaged < at + len(data):
                    data[damaged - at] ^= 1
                at += len(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    threading.Thread(target=carry, args=(giver, caller), daemon=True).start()
    with caller, giver:
        carry(caller, giver, damaged=400_000)


def test_frames_cannot_be_sent_twice(giving: list[Giver], tmp_path: Path) -> None:
    wire = take.call(start(giving, Words(tmp_path / "x")))
    text = b'{"files": [0]}'
    frame = frames.header(frames.JSON, 32 + len(text)) + wire.signature.sign(text) + text
    wire.connection.sendall(frame + frame)
    assert wire.receive() == b"words"
    with pytest.raises(Broken, match=r"hung up|reset"):
        wire.receive()


# -- when it does not go on -------------------------------------------------------------------


def test_a_giver_that_is_silent_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, giving: list[Giver]
) -> None:
    """And one that waits itself is not: it says so."""
    monkeypatch.setattr(wires, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(give, "BEAT_SECONDS", 0.1)
    giver = start(giving, Words(tmp_path / "words"), seconds=1.5)
    waiting = take.call(giver)
    began = time.monotonic()
    with pytest.raises(Broken, match=r"hung up|reset"):
        fetch(waiting, (LATE, 5))
    assert time.monotonic() - began > 1.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        giver = giver.replace(port=silent.getsockname()[1])
        with pytest.raises(Broken, match=r"silent for 0\.5 s"):
            take.call(giver)
    with pytest.raises(Broken, match="connection refused"):
        take.call(giver)


def test_an_address_that_is_not_the_givers_is_passed_over(
    tmp_path: Path, giving: list[Giver]
) -> None:
    giver = start(giving, Words(tmp_path / "words"))
    wire = take.call(giver.replace(addresses=("255.255.255.255", "127.0.0.2")))
    assert fetch(wire, *[(0, 5)] * 1000) == b"words" * 1000


def test_a_giver_ends_with_its_time(tmp_path: Path, giving: list[Giver]) -> None:
    giver = start(giving, Words(tmp_path / "words"), seconds=0.3)
    wire = take.call(giver)
    with pytest.raises(Broken, match=r"hung up|reset"):
        fetch(wire, (LATE, 1))
    with pytest.raises(Broken, match="refused"):
        take.call(giver)


# -- files ------------------------------------------------------------------------------------

MOMENT = 1_700_000_000_000_000_000
FILES = {b"shard/0.bin": os.urandom(600_000), b"shard/1.bin": b"", b"top": b"top"}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name, content in {**FILES, b"secret": b"not given"}.items():
        path = tmp_path / "shards" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(MOMENT, MOMENT))
    return tmp_path / "shards"


def of_shards(root: Path, *names: bytes) -> IncomingFiles:
    """A directory of a job's for some of these files."""
    entries = tuple(Entry(name, FILE, 0o644, len(FILES[name]), b"", MOMENT) for name in names)
    target = TargetDirectory(root, entries, 0o022, private=True)
    return IncomingFiles(target, all_here=True)


def take_files(giving: list[Giver], here: IncomingFiles, there: IncomingFiles) -> Taking:
    return take_all(there, start(giving, here))


def test_files_go_into_a_private_directory(
    tmp_path: Path, shards: Path, giving: list[Giver]
) -> None:
    target = tmp_path / "target"
    for names, came in (((b"top",), 3), (tuple(FILES), 600_000), (tuple(FILES), 0)):
        taking = take_files(giving, of_shards(shards, *names), of_shards(target, *names))
        assert (end_of(taking), taking.size) == ("", came)
    found = {os.fsencode(path.relative_to(target)): path for path in target.rglob("*")}
    assert set(found) == {*FILES, b"shard"}
    assert all(found[name].read_bytes() == content for name, content in FILES.items())
    assert all(path.stat().st_mode & 0o077 == 0 for path in target.rglob("*"))


def test_only_the_files_of_the_manifest_are_given(
    tmp_path: Path, shards: Path, giving: list[Giver]
) -> None:
    here = of_shards(shards, *FILES)
    (shards / "top").unlink()
    (shards / "top").symlink_to("/etc/passwd")
    place = start(giving, here)
    for number, size in ((2, 3), (3, 9), (-1, 9)):  # a link, and numbers of no file
        with pytest.raises(Broken, match="it has no"):
            fetch(take.call(place), (number, size))
    with pytest.raises(ValueError, match="leads out"):
        manifest.unpacked(manifest.packed([Entry(b"../secret", FILE, 0o600, 3, b"")]))


def test_a_file_that_has_changed_since_it_was_listed_is_not_given(
    tmp_path: Path, shards: Path, giving: list[Giver]
) -> None:
    (shards / "top").write_bytes(b"pot")
    names = (b"shard/1.bin", b"top")
    there = of_shards(tmp_path / "target", *names)
    taking = take_files(giving, of_shards(shards, *names), there)
    assert end_of(taking) == "it has no top"
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["shard"]
