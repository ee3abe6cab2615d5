"""The members of a sweep, from what was typed."""

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.commands.sweep import space
from orchestrator.head.commands.sweep.space import command_of, grid_members, parse_variables


def test_grid_yields_each_combination_once_last_variable_fastest() -> None:
    members = grid_members(parse_variables(["lr=1e-4,3e-4", "seed=0..2", 'name=["a,b", 1.5]']))
    assert len(members) == 12 and [one.number for one in members] == list(range(12))
    assert members[0].words == "lr=1e-4 seed=0 name=a,b"
    assert members[1].words == "lr=1e-4 seed=0 name=1.5"
    assert members[-1].words == "lr=3e-4 seed=2 name=1.5"


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["lr"], "is not NAME=VALUES"),
        (["lr=1", "lr=2"], "lr is given twice"),
        (["lr="], "lr has no values"),
        (["lr=[]"], "lr has no values"),
        (["lr=[1"], "not a JSON list"),
        (["lr=1,1"], "a value is given twice"),
        (["seed=3..1"], "the range is empty"),
        (["lr=log(0,1)"], "is not a range"),
        (["lr=uniform(2,1)"], "is not a range"),
        (["lr=uniform(0,inf)"], "is not a range"),
        (["lr=uniform(0,x)"], "is not a range"),
        (["lr=uniform(0,1)"], "is a range without steps"),
        (["a=0..999", "b=0..999"], "would have 1,000,000 members"),
    ],
)
def test_grid_refuses_invalid_variables(texts: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        grid_members(parse_variables(texts))


def test_command_of_passes_values_by_each_style() -> None:
    values = {"lr": "-1 '", "s": "{lr}"}
    assert command_of(["t.py"], values, "args") == (("t.py", "--lr=-1 '", "--s={lr}"), ())
    assert command_of(["t.py"], values, "hydra") == (("t.py", "lr=-1 '", "s={lr}"), ())
    assert command_of(["t.py"], values, "env") == (("t.py",), ("lr=-1 '", "s={lr}"))
    words = ["t.py", "{s}-{lr}", "{other}"]
    assert command_of(words, values, "args") == (("t.py", "{lr}--1 '", "{other}"), ())


def test_of_lines_reads_command_lines() -> None:
    lines = space.members_of_lines("# no\ntrain.py --name 'a b' # yes\n\nb.sh\n")
    assert [one.program for one in lines] == [("train.py", "--name", "a b"), ("b.sh",)]
    with pytest.raises(UsageError, match=r"line 2: .*No closing quotation"):
        space.members_of_lines("a\nb 'c")
    with pytest.raises(UsageError, match="no command line"):
        space.members_of_lines("# nothing\n")
