"""The list of a tree: whatever names there are, it comes back; nothing of it leads elsewhere."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.protocol import manifest as tree
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry
from orchestrator.protocol.message import Nonsense

NOTHING = hashlib.sha256(b"").hexdigest().encode()
NAMES = st.binary(min_size=1, max_size=9).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


@given(st.sets(NAMES, max_size=6))
def test_any_names_come_back(names: set[bytes]) -> None:
    entries = sorted(Entry(b"below/" + name, FILE, 0o755, 0, NOTHING) for name in names)
    listing = tree.packed(reversed(entries))
    assert tree.unpacked(listing) == tuple(entries)
    assert tree.digest_of(listing) == tree.digest_of(tree.packed(entries))


def test_links_and_directories_come_back() -> None:
    entries = (Entry(b"d", DIRECTORY, 0o755, 0, b""), Entry(b"l", LINK, 0, 0, b"../to a\nfile"))
    assert tree.unpacked(tree.packed(entries)) == entries
    assert tree.unpacked(tree.packed([])) == ()


@pytest.mark.parametrize(
    "entry",
    [
        Entry(b"/etc/passwd", FILE, 0o644, 0, NOTHING),
        Entry(b"../up", FILE, 0o644, 0, NOTHING),
        Entry(b"a/../../up", FILE, 0o644, 0, NOTHING),
        Entry(b"a//b", FILE, 0o644, 0, NOTHING),
        Entry(b"", DIRECTORY, 0o755, 0, b""),
        Entry(b"x" * 5000, FILE, 0o644, 0, NOTHING),
        Entry(b"a", FILE, 0o644, 0, NOTHING[:-1]),
        Entry(b"a", FILE, 0o644, 0, b"../../../../etc/" + NOTHING[16:]),
        Entry(b"a", FILE, 0o4755, 0, NOTHING),
        Entry(b"a", FILE, 0o644, -1, NOTHING),
        Entry(b"a", LINK, 0, 0, b""),
        Entry(b"a", b"x", 0o644, 0, NOTHING),
    ],
    ids=repr,
)
def test_what_leads_elsewhere_is_refused(entry: Entry) -> None:
    with pytest.raises(Nonsense):
        tree.unpacked(tree.packed([entry]))


@pytest.mark.parametrize(
    "pair",
    [
        (Entry(b"a", LINK, 0, 0, b"/etc"), Entry(b"a/passwd", FILE, 0o644, 0, NOTHING)),
        (Entry(b"a", FILE, 0o644, 0, NOTHING), Entry(b"a/b/c", FILE, 0o644, 0, NOTHING)),
        (Entry(b"a", FILE, 0o644, 0, NOTHING), Entry(b"a", LINK, 0, 0, b"/etc")),
    ],
    ids=["below a link", "below a file", "twice"],
)
def test_nothing_is_below_a_link(pair: tuple[Entry, Entry]) -> None:
    with pytest.raises(Nonsense):
        tree.unpacked(tree.packed(pair))


@pytest.mark.parametrize("listing", [b"x", b"a\0f\0644\0", tree.packed([])[:0] + b"\0"], ids=repr)
def test_what_is_no_list_is_refused(listing: bytes) -> None:
    with pytest.raises(Nonsense):
        tree.unpacked(listing)
