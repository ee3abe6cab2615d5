from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestrator.head.start.recovery.candidates import Candidate, choose

A, B, C = (Candidate(name, place) for place, name in enumerate("abc"))
S, T = Candidate("s"), Candidate("t")
GONE = "cannot be reached: no route"


def lost(node: Candidate) -> Candidate:
    return replace(node, problem=GONE)


def named(node: Candidate) -> Candidate:
    return replace(node, rests="was named as the cause of 3 failures")


@pytest.mark.parametrize(
    ("candidates", "least", "most", "nodes", "words"),
    [
        ([A, B, C, S], 3, 3, "abc", []),  # most failures need new processes only
        ([A, lost(B), C, S, T], 3, 3, "asc", [f"b {GONE}: s takes its place"]),
        ([lost(A), B, C, S], 3, 3, "sbc", [f"a {GONE}: s takes its place"]),
        ([A, lost(B), C, lost(S), T], 3, 3, "atc", [f"b {GONE}: t takes its place"]),
        (
            [A, named(B), C, S],
            *(3, 3, "asc"),
            ["b was named as the cause of 3 failures: s takes its place"],
        ),
        # What was named before is a spare again when nothing else is left, but not for its like.
        ([A, lost(B), C, named(S)], 3, 3, "asc", [f"b {GONE}: s takes its place"]),
        (
            [A, named(B), C, named(S)],
            *(3, 3, "abc"),
            ["b was named as the cause of 3 failures; it stays, as there is no other node"],
        ),
        (
            [A, lost(B), C],
            *(2, 3, "ac"),
            [
                f"b {GONE}: on without it, as there is no other node",
                "the job continues with 2 of 3 nodes",
            ],
        ),
        (
            [A, lost(B), lost(C), S],
            *(2, 3, "as"),
            [
                f"b {GONE}: s takes its place",
                f"c {GONE}: on without it, as there is no other node",
                "the job continues with 2 of 3 nodes",
            ],
        ),
        (
            [A, named(B), C],
            *(2, 3, "ac"),
            [
                "b was named as the cause of 3 failures: on without it, as there is no other node",
                "the job continues with 2 of 3 nodes",
            ],
        ),
        (
            [A, replace(B, rests="rests"), C],
            *(2, 3, "ac"),
            [
                "b rests: on without it, as there is no other node",
                "the job continues with 2 of 3 nodes",
            ],
        ),
        ([A, B, replace(S, rests="rests")], 2, 3, "ab", []),
        ([A, lost(B), replace(S, rests="rests")], 2, 3, "as", [f"b {GONE}: s takes its place"]),
        ([A, B, S, T], 2, 3, "abs", ["s joins"]),  # it grows again, in the order of numbers
        ([A, B, lost(S), T], 2, 3, "abt", ["t joins"]),
    ],
)
def test_the_same_first_spares_second_fewer_third(
    candidates: list[Candidate], least: int, most: int, nodes: str, words: list[str]
) -> None:
    choice = choose(candidates, least, most)
    assert ("".join(choice.nodes), list(choice.words)) == (nodes, words)
    assert not choice.problem


def test_too_few_are_named_with_what_to_type() -> None:
    choice = choose([A, lost(B), replace(C, problem="is cordoned")], 2, 3)
    assert choice.nodes == ()
    assert choice.problem == (
        f"the job needs at least 2 nodes, and 1 can be used: b {GONE}; c is cordoned"
    )


NODES = some.lists(
    some.builds(
        Candidate,
        name=some.uuids().map(str),
        problem=some.sampled_from(["", GONE]),
        rests=some.sampled_from(["", "", "why"]),
    ),
    max_size=8,
)


@given(NODES, some.integers(0, 8), some.integers(1, 8), some.integers(1, 8))
def test_whatever_fails_the_choice_is_sound(
    candidates: list[Candidate], running: int, one: int, other: int
) -> None:
    least, most = sorted((one, other))
    running = min(running, most)
    candidates = [
        replace(node, place=place if place < running else None)
        for place, node in enumerate(candidates)
    ]
    choice = choose(candidates, least, most)
    by_name = {node.name: node for node in candidates}
    chosen = [by_name[name] for name in choice.nodes]
    assert all(not node.problem for node in chosen)
    assert len(set(choice.nodes)) == len(chosen) <= most
    fit = [node for node in candidates if not node.problem]
    assert bool(choice.problem) is (len(fit) < least) is (not chosen)
    if chosen:
        assert len(chosen) >= least
        stayed = [node for node in chosen if node.place is not None and node.good]
        good = [node for node in fit if node.place is not None and node.good]
        assert stayed == sorted(good, key=lambda node: node.place or 0)
