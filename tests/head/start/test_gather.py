"""The nodes of the next attempt and their numbers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestrator.common.errors import NodeError
from orchestrator.config.launch import Launch
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.screen import events
from orchestrator.head.screen.events import Listener
from orchestrator.head.start import gather
from orchestrator.head.start.gather import Gathering, NotBack
from orchestrator.head.start.launch import NotStarted
from orchestrator.head.start.record import not_started
from orchestrator.head.start.selection import Candidate, choose_candidates
from orchestrator.protocol.requests.claims import Taken
from orchestrator.protocol.requests.follow import LivingRuns
from orchestrator.protocol.requests.start import Claim, Claimed
from orchestrator.records import experiments
from orchestrator.records.experiment import Attempt, JobRecord, NodeRecord
from orchestrator.records.outcome import JobVerdict


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(events, "listeners", [Listener()])
    monkeypatch.setattr(gather, "SPARED_SECONDS", 0.0)


def node(index: int, name: str, state: str = "ended") -> NodeRecord:
    return NodeRecord(index, name, name, None, None, f"10.0.0.{index}", "py", index * 2, 2, state)


def record(nodes: str, lost: str = "", spares: str = "", nnodes: str | None = None) -> JobRecord:
    parts = [node(at, name, "lost" if name in lost else "ended") for at, name in enumerate(nodes)]
    verdict = JobVerdict(node=0, node_name=nodes[0], kind="lost", message="gone")
    first = Attempt(1, 0.0, 1.0, "lost", 4, verdict if lost else None, list(nodes))
    launch = Launch(max_restarts=3, nnodes=nnodes, node_loss_timeout=0.0)
    standing = [node(len(nodes) + at, name, "standing by") for at, name in enumerate(spares)]
    return JobRecord(
        *("run-1", "run", "restarting", ["x"], parts, 0.0),
        launch=launch,
        attempts=[first],
        spares=standing,
    )


def lost_before(nodes: str, spare: str, nnodes: str | None = None) -> JobRecord:
    job = record(nodes, spares=spare, nnodes=nnodes)
    return replace(job, spares=[replace(one, state="lost") for one in job.spares])


class Asking(Gathering):
    """Nodes of which some do not answer."""

    silent = wiped = taken = ""

    def reach(self, node: NodeRecord) -> NodeChannel:
        self.asked = [*getattr(self, "asked", []), node.name]
        if node.name in self.silent:
            raise NodeError("it does not answer")
        answer = LivingRuns(living=(), stored=() if node.name in self.wiped else (("run-1", 0),))

        def ask(request: object, _: float) -> object:
            if isinstance(request, Claim):
                others = Taken(names=("GPU 0",), user="bob", job="theirs")
                taken = (others,) if node.name in self.taken else ()
                return Claimed(held=not taken, taken=taken)
            return answer

        closed = SimpleNamespace(close=lambda: None)

        def wait_for(_: int, request: object, timeout: float, since: float) -> object:
            return ask(request, timeout)

        return cast(
            Any,
            SimpleNamespace(connection=closed, ask=ask, post=lambda _: 1, wait_for=wait_for),
        )


def gathering(tmp_path: Path, job: JobRecord, silent: str = "") -> tuple[Asking, list[str]]:
    said: list[str] = []
    place = experiments.create_experiment(tmp_path / "experiments", "run")
    events.listeners.append(Listener(draw=lambda told: said.append(told.words())))
    asking = Asking(place, job, cast(Any, None), {})
    asking.silent = silent
    return asking, said


@pytest.mark.parametrize(
    ("job", "silent", "nodes", "spares"),
    [
        (record("abc"), "", "abc", ""),
        (record("abc", spares="s"), "", "abc", "s"),
        (record("abc", "a", "s"), "a", "sbc", "a"),
        (record("abc", "b", "st"), "bs", "atc", "bs"),
        (record("abc", "", "s"), "c", "abs", "c"),
        (record("abc", "b", "s"), "s", "abc", "s"),  # the lost one is back: it is looked for
        (record("abc", "b", "", "2:3"), "b", "ac", "b"),
        (record("ac", "", "b", "2:3"), "", "acb", ""),
        (lost_before("ac", "b", "2:3"), "", "acb", ""),  # it was lost, and is back
        (lost_before("ac", "b", "2:3"), "b", "ac", "b"),
    ],
)
def test_gather_keeps_good_nodes_and_fills_with_spares(
    job: JobRecord, silent: str, nodes: str, spares: str, tmp_path: Path
) -> None:
    asking, _ = gathering(tmp_path, job, silent)
    gathered = asking.run()
    assert "".join(one.name for one in gathered.nodes) == nodes
    assert "".join(sorted(one.name for one in gathered.spares)) == spares
    assert [(one.index, one.first_rank) for one in gathered.nodes] == [
        (at, at * 2) for at in range(len(nodes))
    ]
    before = {one.name: one.index for one in (*job.nodes, *job.spares)}
    for one in (*gathered.nodes, *gathered.spares):
        assert one.part == before[one.name]
    assert set(asking.open) == set(nodes)


@pytest.mark.parametrize(("spares", "nodes"), [("s", "asc"), ("", "")])
def test_node_with_taken_gpus_is_replaced(spares: str, nodes: str, tmp_path: Path) -> None:
    asking, said = gathering(tmp_path, record("abc", spares=spares))
    asking.taken = "b"
    why = "b cannot hold the job's GPUs: GPU 0: bob, job theirs"
    if nodes:
        assert "".join(one.name for one in asking.run().nodes) == nodes
        assert f"{why}: s takes its place" in said
    else:
        with pytest.raises(NotBack, match=why):
            asking.run()


def test_lost_node_is_replaced_without_wait(tmp_path: Path) -> None:
    asking, said = gathering(tmp_path, record("abc", "a", "s"), "a")
    asking.run()
    assert "a" not in asking.asked
    assert said == ["a is lost: s takes its place"]


def test_error_names_missing_nodes(tmp_path: Path) -> None:
    asking, _ = gathering(tmp_path, record("abc", "a"), "a")
    with pytest.raises(NotBack, match="needs at least 3 nodes, and 2 can be used: a cannot be re"):
        asking.run()


@pytest.mark.parametrize(
    ("job", "nodes", "said"),
    [
        (record("abc", spares="s"), "asc", f"b {gather.NOTHING_LEFT}: s takes its place"),
        (record("abc", nnodes="2:3"), "ac", "the job continues with 2 of 3 nodes"),
    ],
)
def test_node_with_empty_disk_is_replaced(
    job: JobRecord, nodes: str, said: str, tmp_path: Path
) -> None:
    asking, heard = gathering(tmp_path, job)
    asking.wiped = "b"
    assert "".join(one.name for one in asking.run().nodes) == nodes
    assert said in heard
    asking, _ = gathering(tmp_path, record("abc"))
    asking.wiped = "b"
    with pytest.raises(NotBack, match="b has lost its part of the job"):
        asking.run()


def test_node_that_could_not_begin_is_replaced_at_once(tmp_path: Path) -> None:
    """Three such attempts in a row would be the end of the job, with a spare that stands by."""
    job = record("abc", spares="s")
    full = NotStarted(job.nodes, [(job.nodes[1], NodeError("its disk is full"))], ())
    failed = not_started(replace(job, attempts=[]), full)
    assert failed.verdict is not None and failed.verdict.node_name == "b"
    attempt = replace(job.attempts[0], state="failed", verdict=failed.verdict, ran=0.0)
    asking, said = gathering(tmp_path, replace(failed, attempts=[attempt]))
    assert "".join(one.name for one in asking.run().nodes) == "asc"
    assert said == ["b could not do its part of the start: s takes its place"]


def never_began(job: JobRecord, errors: str) -> JobRecord:
    """Return the job after an attempt that these nodes kept from starting."""
    at = dict.fromkeys(errors, "its disk is full")
    error = NodeError("; ".join(f"{name}: {what}" for name, what in at.items()), names=[*at])
    failed = not_started(replace(job, attempts=[]), error)
    number = len(job.attempts) + 1
    nodes = [node.name for node in job.nodes]
    last = Attempt(number, 1.0, 2.0, "failed", 4, failed.verdict, nodes, ran=0.0)
    return replace(failed, attempts=[*job.attempts, last])


def test_failed_nodes_return_only_after_all_spares(tmp_path: Path) -> None:
    failed = never_began(record("abc", spares="stu"), "bc")
    gathered = gathering(tmp_path, failed)[0].run()
    assert "".join(one.name for one in gathered.nodes) == "ast"
    again = never_began(replace(failed, nodes=gathered.nodes, spares=gathered.spares), "s")
    asking, said = gathering(tmp_path, again)
    assert "".join(one.name for one in asking.run().nodes) == "aut"
    assert said == ["s could not do its part of the start: u takes its place"]


@pytest.mark.parametrize(
    ("kind", "times", "ran", "words"),
    [
        ("signal", 3, None, "was named as the cause of 3 failures"),
        ("disk_full", 1, 5.0, "has no space left on a disk"),
        ("gpu_fault", 1, 5.0, "has a broken GPU"),
    ],
)
def test_node_likely_to_fail_again_is_replaced(
    tmp_path: Path, kind: str, times: int, ran: float | None, words: str
) -> None:
    job = record("abc", spares="s")
    verdict = JobVerdict(node=1, node_name="b", kind=kind, message="OSError: [Errno 28]")
    job = replace(job, attempts=[replace(job.attempts[0], verdict=verdict, ran=ran)] * times)
    asking, said = gathering(tmp_path, job)
    assert "".join(one.name for one in asking.run().nodes) == "asc"
    assert said == [f"b {words}: s takes its place"]


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
        # Most failures need only new processes.
        ([A, B, C, S], 3, 3, "abc", []),
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
def test_choose_prefers_same_nodes_then_spares_then_fewer(
    candidates: list[Candidate], least: int, most: int, nodes: str, words: list[str]
) -> None:
    choice = choose_candidates(candidates, least, most)
    assert ("".join(choice.nodes), list(choice.words)) == (nodes, words)
    assert not choice.problem


def test_choose_names_too_few_nodes() -> None:
    choice = choose_candidates([A, lost(B), replace(C, problem="is lost")], 2, 3)
    assert choice.nodes == ()
    assert choice.problem == (
        f"the job needs at least 2 nodes, and 1 can be used: b {GONE}; c is lost"
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
def test_choose_is_sound_for_any_failures(
    candidates: list[Candidate], running: int, one: int, other: int
) -> None:
    least, most = sorted((one, other))
    running = min(running, most)
    candidates = [
        replace(node, place=place if place < running else None)
        for place, node in enumerate(candidates)
    ]
    choice = choose_candidates(candidates, least, most)
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
