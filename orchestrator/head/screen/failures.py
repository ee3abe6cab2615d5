"""Formats the errors of failed nodes with their fixes, equal errors once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.hosts import fold_names
from orchestrator.common.text import align_columns
from orchestrator.head.nodes.facts import nodes_by_value

# More nodes than this with one error share a line.
MANY = 16

N = TypeVar("N")
R = TypeVar("R")
V = TypeVar("V")


class Named(Protocol):
    """Any object of a node that has its name."""

    @property
    def name(self) -> str: ...


M = TypeVar("M", bound=Named)


def failed_nodes(
    nodes: Sequence[M], results: Sequence[R | OrchestratorError]
) -> list[tuple[M, OrchestratorError]]:
    """Return the nodes that failed, each with its error."""
    pairs = zip(nodes, results, strict=True)
    return [(node, result) for node, result in pairs if isinstance(result, OrchestratorError)]


def results_or_error(
    nodes: Sequence[Named],
    results: Sequence[R | OrchestratorError],
    then: str,
    total: int | None = None,
) -> list[R]:
    """Return the results, or raise one NodeError that names every failed node."""
    failed = failed_nodes(nodes, results)
    if failed:
        raise NodeError(failure_table(failed, total or len(nodes), then))
    return [result for result in results if not isinstance(result, OrchestratorError)]


def failure_table(failed: Sequence[tuple[M, OrchestratorError]], total: int, then: str) -> str:
    """Return a table of the failed nodes and their errors, with each fix once."""
    rows = []
    for what, fix, names in alike((node.name, error.what, error.fix) for node, error in failed):
        rows += [(name, what) for name in names]
        if fix:
            rows.append(("", f"  -> {fix}"))
    first = f"{len(failed)} of {total} nodes cannot be used{then}"
    return "\n  ".join([first, *align_columns(rows)])


def failure_lines(failed: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each failed node and each fix; unwrapped, so fixes can be copied."""
    return [
        line
        for what, fix, names in alike(failed)
        for line in (*(f"{name}: {what}" for name in names), *[f"  -> {fix}"] * bool(fix))
    ]


def alike(failed: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (error, fix, names) for each distinct error; many names are folded into one."""
    for what, fix, names in group_errors(failed):
        yield what, fix, shorten_names(names)


def group_errors(failed: Iterable[tuple[N, V, str]]) -> Iterator[tuple[V, str, list[N]]]:
    """Yield (error, fix, nodes) for each distinct error.

    For many nodes with a fix each, the first fix is an example; for a few, all are listed.
    """
    for what, nodes in nodes_by_value(((node, fix), what) for node, what, fix in failed).items():
        if len(nodes) > MANY:
            yield what, common_fix([fix for _, fix in nodes]), [node for node, _ in nodes]
        else:
            for fix, those in nodes_by_value(nodes).items():
                yield what, fix, those


def common_fix(fixes: Sequence[str]) -> str:
    """Return the common fix of nodes; if fixes differ, the first as an example."""
    return fixes[0] if len(set(fixes)) == 1 else f"{fixes[0]}  # for each of them, with its name"


def shorten_names(names: list[str]) -> list[str]:
    """Return the names to show; more than MANY are folded into one, as gpu[01-32]."""
    return [fold_names(names)] if len(names) > MANY else names
