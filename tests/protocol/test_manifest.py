"""A tree's list is read back with any names in it; no entry leads outside of the tree."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.protocol import manifest as tree
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, ManifestEntry, link_is_inside
from orchestrator.protocol.message import Nonsense

NOTHING = hashlib.sha256(b"").hexdigest().encode()
NAMES = st.binary(min_size=1, max_size=9).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


@given(st.sets(NAMES, max_size=6))
def test_any_names_round_trip(names: set[bytes]) -> None:
    entries = sorted(ManifestEntry(b"below/" + name, FILE, 0o755, 0, NOTHING) for name in names)
    listing = tree.pack_entries(reversed(entries))
    assert tree.unpack_entries(listing) == tuple(entries)
    assert tree.digest_of(listing) == tree.digest_of(tree.pack_entries(entries))


def test_links_and_directories_round_trip() -> None:
    entries = (
        ManifestEntry(b"d", DIRECTORY, 0o755, 0, b""),
        ManifestEntry(b"l", LINK, 0, 0, b"../to a\nfile"),
    )
    assert tree.unpack_entries(tree.pack_entries(entries)) == entries
    assert tree.unpack_entries(tree.pack_entries([])) == ()


@pytest.mark.parametrize(
    "entries",
    [
        (ManifestEntry(b"/etc/passwd", FILE, 0o644, 0, NOTHING),),
        (ManifestEntry(b"../up", FILE, 0o644, 0, NOTHING),),
        (ManifestEntry(b"a/../../up", FILE, 0o644, 0, NOTHING),),
        (ManifestEntry(b"a//b", FILE, 0o644, 0, NOTHING),),
        (ManifestEntry(b"", DIRECTORY, 0o755, 0, b""),),
        (ManifestEntry(b"x" * 5000, FILE, 0o644, 0, NOTHING),),
        (ManifestEntry(b"a", FILE, 0o644, 0, NOTHING[:-1]),),
        (ManifestEntry(b"a", FILE, 0o644, 0, b"../../../../etc/" + NOTHING[16:]),),
        (ManifestEntry(b"a", FILE, 0o4755, 0, NOTHING),),
        (ManifestEntry(b"a", FILE, 0o644, -1, NOTHING),),
        (ManifestEntry(b"a", LINK, 0, 0, b""),),
        (ManifestEntry(b"a", b"x", 0o644, 0, NOTHING),),
        # Below a link, below a file, twice.
        (
            ManifestEntry(b"a", LINK, 0, 0, b"/etc"),
            ManifestEntry(b"a/passwd", FILE, 0o644, 0, NOTHING),
        ),
        (
            ManifestEntry(b"a", FILE, 0o644, 0, NOTHING),
            ManifestEntry(b"a/b/c", FILE, 0o644, 0, NOTHING),
        ),
        (ManifestEntry(b"a", FILE, 0o644, 0, NOTHING), ManifestEntry(b"a", LINK, 0, 0, b"/etc")),
    ],
    ids=repr,
)
def test_entries_outside_or_below_link_are_refused(entries: tuple[ManifestEntry, ...]) -> None:
    with pytest.raises(Nonsense):
        tree.unpack_entries(tree.pack_entries(entries))


@pytest.mark.parametrize(
    "listing", [b"x", b"a\0f\0644\0", tree.pack_entries([])[:0] + b"\0"], ids=repr
)
def test_invalid_listing_is_refused(listing: bytes) -> None:
    with pytest.raises(Nonsense):
        tree.unpack_entries(listing)


WAYS = st.lists(st.sampled_from(["a", "b", "..", "."]), min_size=1, max_size=5).map("/".join)
PLACES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map("/".join)


@given(st.lists(st.tuples(PLACES, WAYS), max_size=6))
def test_accepted_links_stay_inside_together(links: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve() / "root"
        (root / "a/b").mkdir(parents=True)
        for path, target in links:
            with contextlib.suppress(OSError, ValueError):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                above = (root / path).parent.resolve().relative_to(root)  # no link is written below
                if str(above / Path(path).name) == path and link_is_inside(path, target):
                    (root / path).symlink_to(target)
        for path in root.rglob("*"):
            # For a circle of links this is the path as it is written.
            end = Path(os.path.realpath(path))
            assert root in (end, *end.parents), path


def test_link_is_inside_rejects_escaping_targets() -> None:
    assert link_is_inside("a/b/c/p", "../../..")
    assert not link_is_inside("evil", "a/b/c/p/../../etc")
    assert link_is_inside("a/l", "../b//./c") and not link_is_inside("a/l", "../../b")
    assert not any(link_is_inside("a/l", target) for target in ("", "/etc", "b\0c"))
