"""Which files go from whom to whom: tables of what nodes have, and what must hold for any nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.head.transfer.bring.decide import Key, View, decide, is_equal
from orchestrator.protocol.requests.transfer import Overwritten, SavedFile

NAMES = "abc"


def file(text: str) -> SavedFile:
    """Read a file from words: its writer or nothing, the time, the attempt, and "half"."""
    by, changed, attempt, *more = text.split(" ")
    return SavedFile(
        path="",
        size=1,
        by=by.strip("-"),
        changed=int(changed),
        attempt=int(attempt),
        sum=changed,
        sound="half" not in more,
    )


def views(*nodes: Mapping[str, str]) -> list[View]:
    """Return nodes a, b, ... with files by their names; "removed" is a copy that has gone there."""
    return [
        View(
            name,
            {Key("work", path): file(text) for path, text in files.items() if text != "removed"},
            frozenset(Key("work", path) for path, text in files.items() if text == "removed"),
        )
        for name, files in zip(NAMES, nodes, strict=False)
    ]


OWN, LATER, HALF = "- 5 1", "- 7 2", "- 7 2 half"
OF_A, OF_LOST = "a 5 1", "z 5 1"


@pytest.mark.parametrize(
    ("nodes", "copies", "gone"),
    [
        pytest.param([{"x": OWN}, {}], ["x a>b"], [], id="who has none gets it"),
        pytest.param([{"x": OWN}, {"x": OF_A}], [], [], id="who has it gets nothing"),
        pytest.param([{"x": LATER}, {"x": OF_A}], ["x a>b"], [], id="copies become newer"),
        pytest.param([{"x": OWN}, {"x": "- 6 1"}], [], [], id="each keeps its own"),
        pytest.param(
            [{"x": OWN}, {"x": "- 6 1"}, {}], ["x b>c"], [], id="who has none gets the newest"
        ),
        pytest.param([{}, {"x": OF_A}], ["x b>a"], [], id="who lost its disk gets it back"),
        pytest.param([{"y": OWN}, {"x": OF_A, "y": OF_A}], [], ["x b"], id="its writer removed it"),
        pytest.param([{}, {"x": OF_LOST}], ["x b>a"], [], id="copies of a lost node go on"),
        pytest.param([{"x": "removed"}, {"x": OF_LOST}], [], ["x b"], id="a reader removed it"),
        pytest.param(
            [{"x": "z 5 1"}, {"x": "z 9 2"}], ["x b>a"], [], id="the newest copy of a lost node"
        ),
        pytest.param([{"x": HALF}, {}], ["x a>b"], [], id="half a file, as a shared disk shows it"),
        pytest.param(
            [{"x": HALF}, {"x": OF_A}], ["x b>a!"], [], id="what was before takes its place"
        ),
        pytest.param(
            [{"d/x": HALF, "d/y": LATER, "z": LATER}, {"d/x": OF_A, "d/y": OF_A, "z": OF_A}],
            ["d/x b>a!", "d/y b>a!", "z a>b"],
            [],
            id="with all of the same directory: a state of two files is of one step",
        ),
        pytest.param(
            [{"x": HALF}, {"x": "a 5 1 half"}], ["x a>b"], [], id="half of it is no state"
        ),
    ],
)
def test_what_goes_where(
    nodes: Sequence[Mapping[str, str]], copies: list[str], gone: list[str]
) -> None:
    decision = decide(views(*nodes), {1: "abc", 2: "abc"})
    assert [
        f"{copy.key} {NAMES[copy.source]}>{NAMES[copy.target]}{'!' * copy.replaces}"
        for copy in decision.copies
    ] == copies
    assert [f"{key} {NAMES[at]}" for at, keys in decision.gone.items() for key in keys] == gone


def test_who_was_away_when_another_wrote_it_has_missed_it() -> None:
    nodes = views({"x": OWN}, {"x": LATER})
    (copy,) = decide(nodes, {1: "ab", 2: "b"}).copies
    assert (copy.source, copy.target, copy.replaces) == (1, 0, True)
    decision = decide(nodes, {1: "ab", 2: "ab"})
    assert not decision.copies and list(decision.different) == [Key("work", "x")]


def test_a_rank_that_writes_from_another_node_than_before_writes_one_file() -> None:
    """Node a, which was the first in attempt 1, stayed as another one."""
    over = Overwritten(by="a", changed=5)
    key = Key("work", "x")

    def decided(first: str, **changes: Overwritten) -> list[tuple[int, int, bool]]:
        a, b, c = views({"x": first}, {"x": LATER}, {"x": OF_A})
        b = replace(b, files={key: b.files[key].replace(**changes)})
        copies = decide([a, b, c], {1: "abc", 2: "abc"}).copies
        return [(copy.source, copy.target, copy.replaces) for copy in copies]

    assert decided(OWN, over=over) == [(1, 0, True), (1, 2, False)]
    assert decided(OWN) == [(1, 2, False)]  # each has written its own
    assert decided("- 6 1", over=over) == [(1, 2, False)]  # and a later one than that
    assert decided("- 6 2", over=over) == [(1, 2, False)]  # both in one attempt
    links = views({"x": OWN}, {"x": LATER})
    a, b = (replace(view, files={key: view.files[key].replace(kind="link", changed=0, target=to)})
            for view, to in zip(links, ("s5", "s7"), strict=True))  # fmt: skip
    b = replace(b, files={key: b.files[key].replace(over=Overwritten(by="a", target="s5"))})
    assert [copy.target for copy in decide([a, b], {1: "ab", 2: "ab"}).copies] == [0]


def test_what_a_node_may_have_is_left_as_it_is() -> None:
    """One that could not list all, or did not answer."""
    a, b = views({}, {"x": OF_A})
    decision = decide([replace(a, whole=False), b], {1: "ab"})
    assert not decision.copies and not decision.gone


FILES = st.builds(
    SavedFile,
    path=st.just(""),
    size=st.integers(0, 2),
    by=st.sampled_from(["", "", "a", "b", "z"]),
    changed=st.integers(1, 3),
    attempt=st.integers(1, 3),
    sum=st.sampled_from("xy"),
    sound=st.booleans(),
)
KEYS = st.builds(Key, st.just("work"), st.sampled_from(["x", "d/y", "d/z"]))
NODES = st.lists(
    st.builds(
        View, st.just(""), st.dictionaries(KEYS, FILES), st.frozensets(KEYS), whole=st.booleans()
    ),
    min_size=1,
    max_size=3,
).map(lambda nodes: [replace(node, name=name) for name, node in zip(NAMES, nodes, strict=False)])


@given(NODES, st.dictionaries(st.integers(1, 3), st.sampled_from(["a", "ab", "abc"])))
def test_for_any_nodes(nodes: list[View], nodes_of: dict[int, str]) -> None:
    """All have all, nothing that a node wrote is lost, and there is nothing more to do then."""
    decision = decide(nodes, nodes_of)
    after = [dict(node.files) for node in nodes]
    for copy in decision.copies:
        before = nodes[copy.target].files.get(copy.key)
        own = before is not None and nodes[copy.target].is_its_own(copy.key)
        assert copy.replaces == own and copy.source != copy.target
        after[copy.target][copy.key] = nodes[copy.source].files[copy.key].replace(by=copy.by)
    for node, keys in decision.gone.items():
        for key in keys:
            assert not nodes[node].is_its_own(key)
            del after[node][key]
    changed = [replace(node, files=files) for node, files in zip(nodes, after, strict=True)]
    if all(node.whole for node in nodes):
        assert len({frozenset(files) for files in after}) == 1
    for key, keepers in decision.different.items():
        assert all(after[node][key] == nodes[node].files[key] for node in keepers)
        assert not all(is_equal(after[node][key], after[keepers[0]][key]) for node in keepers)
    again = decide(changed, nodes_of)
    assert not again.copies and not any(again.gone.values())
