"""What is signed arrives as it was said, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from orchestrator.node.follow.relay.signed import HEAD, KEY_BYTES, LARGEST_BYTES, Forged, Signed

KEY = bytes(range(KEY_BYTES))
ONE = HEAD.size + 3  # bytes of a record with three


@pytest.fixture
def head() -> Signed:
    return Signed(KEY, calls=True)


@pytest.fixture
def node() -> Signed:
    return Signed(KEY, calls=False)


def test_both_ends_read_what_the_other_one_says(head: Signed, node: Signed) -> None:
    for said in (b"one", b"", b"two" * 1000):
        assert node.open(head.seal(said)) == said
        assert head.open(node.seal(said)) == said


def test_an_empty_word_proves_who_says_it(head: Signed, node: Signed) -> None:
    assert not node.proved
    assert node.open(head.seal(b"")) == b""
    assert node.proved
    assert not head.proved


def test_what_is_large_comes_in_any_pieces(head: Signed, node: Signed) -> None:
    said = os.urandom(2 * LARGEST_BYTES + 5)
    carried = head.seal(said)
    assert len(carried) == len(said) + 3 * HEAD.size
    pieces = [carried[at : at + 9_999] for at in range(0, len(carried), 9_999)]
    assert b"".join(map(node.open, pieces)) == said
    assert b"".join(node.open(bytes([byte])) for byte in head.seal(b"slow")) == b"slow"


@pytest.mark.parametrize(
    "forge",
    [
        lambda carried: carried[:-1] + b"!",
        lambda carried: b"\0\0\0\2" + carried[4:],
        lambda carried: carried[:4] + bytes(32) + carried[36:],
        lambda carried: carried[ONE:],  # the first one is left out
        lambda carried: carried[:ONE] * 2,
        lambda carried: carried[ONE : 2 * ONE] + carried[:ONE],
        lambda carried: b"\x7f" + carried[1:],  # longer than any
    ],
)
def test_what_was_not_said_there_is_found_out(
    head: Signed, node: Signed, forge: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(Forged):
        node.open(forge(head.seal(b"one") + head.seal(b"two")))


def test_what_was_said_before_it_is_not_given_out_with_a_forged_word(
    head: Signed, node: Signed
) -> None:
    assert node.open(head.seal(b"one")) == b"one"
    with pytest.raises(Forged):
        node.open(head.seal(b"two") + head.seal(b"bad")[:-1] + b"!")


def test_nobody_hears_its_own_words_as_the_others(head: Signed) -> None:
    with pytest.raises(Forged):
        head.open(head.seal(b"one"))


def test_another_key_is_no_key(head: Signed) -> None:
    with pytest.raises(Forged):
        Signed(bytes(KEY_BYTES), calls=False).open(head.seal(b"one"))
