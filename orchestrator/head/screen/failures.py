"""Names every node that failed, with its error and what to type, each alike error once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.hosts import folded
from orchestrator.common.text import table
from orchestrator.head.nodes.facts import by_value

MANY = 16  # nodes of which each has no line of its own

N = TypeVar("N")
R = TypeVar("R")
V = TypeVar("V")


class Named(Protocol):
    """A node, by whatever is known of it."""

    @property
    def name(self) -> str: ...


M = TypeVar("M", bound=Named)


def failures(
    nodes: Sequence[M], results: Sequence[R | OrchestratorError]
) -> list[tuple[M, OrchestratorError]]:
    """Return the nodes that failed, each with its error."""
    pairs = zip(nodes, results, strict=True)
    return [(node, result) for node, result in pairs if isinstance(result, OrchestratorError)]


def all_or_table(
    nodes: Sequence[Named],
    results: Sequence[R | OrchestratorError],
    then: str,
    total: int | None = None,
) -> list[R]:
    """Return the results, or raise one error that names every node that failed, of how many."""
    failed = failures(nodes, results)
    if failed:
        raise NodeError(failure_table(failed, total or len(nodes), then))
    return [result for result in results if not isinstance(result, OrchestratorError)]


def failure_table(failed: Sequence[tuple[M, OrchestratorError]], total: int, then: str) -> str:
    """Name every node that failed, its error and, once for those that fail alike, the fix."""
    rows = []
    for what, fix, names in alike((node.name, error.what, error.fix) for node, error in failed):
        rows += [(name, what) for name in names]
        if fix:
            rows.append(("", f"  -> {fix}"))
    lines = [f"{len(failed)} of {total} nodes cannot be used{then}"]
    lines += [f"  {line}" for line in table(rows)]
    return "\n".join(lines)


def reasons(failed: Iterable[tuple[str, str, str]]) -> list[str]:
    """Name why each node failed, and what to type; unwrapped, as fixes are to be copied."""
    lines = []
    for what, fix, names in alike(failed):
        lines += [*(f"{name}: {what}" for name in names), *[f"  -> {fix}"] * bool(fix)]
    return lines


def alike(failed: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each error once: what and fix, and the nodes that have it; many of them folded."""
    for what, fix, names in kinds(failed):
        yield what, fix, few(names)


def kinds(failed: Iterable[tuple[N, V, str]]) -> Iterator[tuple[V, str, list[N]]]:
    """Yield what went wrong, its fix, and the nodes of it.

    Many fixes that name their own node have one example; those of a few are all there to copy.
    """
    for what, nodes in by_value(((node, fix), what) for node, what, fix in failed).items():
        if len(nodes) > MANY:
            yield what, for_all([fix for _, fix in nodes]), [node for node, _ in nodes]
        else:
            for fix, those in by_value(nodes).items():
                yield what, fix, those


def for_all(fixes: Sequence[str]) -> str:
    """Return the fix of nodes that fail alike: where each has its own, the first, as an example."""
    return fixes[0] if len(set(fixes)) == 1 else f"{fixes[0]}  # for each of them, with its name"


def few(names: list[str]) -> list[str]:
    """Return names to show: many of them as one, folded."""
    return [folded(names)] if len(names) > MANY else names
