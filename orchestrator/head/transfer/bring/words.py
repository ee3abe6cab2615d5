"""Says what was brought, what was not, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from orchestrator.common.text import duration, plural, size
from orchestrator.head.nodes.facts import listed
from orchestrator.head.screen.output import printable
from orchestrator.head.transfer.bring.decide import Copying, Decision, Key, View

EACH_ITS_OWN = (
    "each keeps its own; where ranks go on from it, save on rank 0 alone, or put the rank into its"
    " name"
)
APART = "its ranks would begin anew, or from an older state, beside those that go on"
LEAVE_OUT = (
    "; what is in a directory whose name begins with a dot is left out: no rank reads it again"
)
MEND = f"mend that, and launch again{LEAVE_OUT}"
LARGE = f"orchestrator.distributed.copy_to_nodes(path) in the program brings it{LEAVE_OUT}"
HALF = (
    "it was being written when its rank ended: save under another name and os.replace() it, so that"
    " a whole one is always there"
)


def named(keys: Collection[Key], views: Sequence[View]) -> str:
    """Name the largest of these files, and say how many there are."""
    sizes = {key: file.size for view in views for key, file in view.files.items()}
    largest = max(keys, key=lambda key: (sizes.get(key, 0), key))
    first = printable(str(largest))
    return f"{first} and {len(keys) - 1} more" if len(keys) > 1 else first


def lacking(copies: Sequence[Copying], views: Sequence[View], failed: Mapping[int, str]) -> str:
    """Say what nodes do not have as others have it, and why."""
    said = []
    for target, why in sorted(failed.items()):
        keys = {copy.key for copy in copies if copy.target == target}
        sources = listed(
            [views[n].name for n in sorted({copy.source for copy in copies if copy.key in keys})]
        )
        what = f"{named(keys, views)}, as {sources} has it" if keys else "the last removals"
        said.append(f"{views[target].name} does not have {what} ({printable(why)})")
    return f"{'; '.join(said)}: {APART}"


def begins(copies: Sequence[Copying], views: Sequence[View]) -> str:
    """Say what is about to take a while."""
    takers = listed([views[node].name for node in sorted({copy.target for copy in copies})])
    what = named({copy.key for copy in copies}, views)
    return f"bringing {what} ({size(of_all(copies, views))}) to {takers}"


def of_all(copies: Sequence[Copying], views: Sequence[View]) -> int:
    """Return how many bytes they are, each once."""
    return sum({copy.key: views[copy.source].files[copy.key].size for copy in copies}.values())


def come(copies: Sequence[Copying], views: Sequence[View], took: float) -> str:
    """Say what all have now, and who had it."""
    keys = {copy.key for copy in copies}
    sources, targets = {copy.source for copy in copies}, {copy.target for copy in copies}
    givers = listed([views[node].name for node in sorted(sources)])
    takers = listed([views[node].name for node in sorted(targets)])
    what = f"{named(keys, views)} ({size(of_all(copies, views))})"
    if targets <= sources:
        who = f"{givers} each had a part of {what}: each has all of it now"
    else:
        has = "has" if len(targets) == 1 else "have"
        who = f"only {givers} had {what}: {takers} {has} it now, too"
    older = sorted(copy.key.name for copy in copies if copy.replaces)
    kept = f"; what was there is kept as .{older[0]}.1.before" if older else ""
    return f"{who}, in {duration(took)}, checksums compared{kept}"


def notes(decision: Decision, views: Sequence[View]) -> Iterator[str]:
    """Say what nobody could decide."""
    if short := [view.name for view in views if view.files and not view.whole]:
        yield (
            f"WARNING: {listed(short)}: too many files to look at in the program's directory: what"
            " it saved may not all be on the other nodes"
        )
    for key, (node, holder) in decision.restored.items():
        if key in decision.unsound:
            yield (
                f"{printable(str(key))} on {views[node].name} lacks its end, as its rank ended"
                f" while it wrote it: what it was before, which {views[holder].name} has, takes its"
                " place"
            )
    unsound = {k: node for k, node in decision.unsound.items() if k not in decision.restored}
    if unsound:
        node = min(unsound.values())
        what = named([key for key, other in unsound.items() if other == node], views)
        yield f"WARNING: {what} on {views[node].name} lacks its end: {HALF}"
    if decision.different:
        nodes = sorted({node for nodes in decision.different.values() for node in nodes})
        who = listed([views[node].name for node in nodes])
        yield f"{who} have each written another {named(decision.different, views)}: {EACH_ITS_OWN}"
    names = {view.name for view in views}
    for by in sorted(set(decision.of_lost.values())):
        keys = {key for key, owner in decision.of_lost.items() if owner == by}
        lost = "has lost its files" if by in names else "is not there"
        yield (
            f"{by} {lost}, and with it what it alone has saved since it was brought to"
            f" others: the ranks find {named(keys, views)} as it was then"
        )


def all_lost(away: Sequence[str]) -> str:
    return (
        f"WARNING: what the program saved on {listed(away)}, if anything, is not there, and no"
        " other node has files that it saved: its ranks begin anew."
        " orchestrator.distributed.copy_to_nodes(path) brings others at once what rank 0 saves"
    )


def too_much(copies: Sequence[Copying], total: int, views: Sequence[View], most: int) -> str:
    sources = listed([views[n].name for n in sorted({copy.source for copy in copies})])
    return (
        f"saved on {sources} alone: {named({copy.key for copy in copies}, views)}"
        f" ({plural(len(copies), 'file')}, {size(total)}), which is more than the {size(most)} that"
        f" are brought to others: {APART}"
    )


def unseen(name: str, seconds: float) -> tuple[str, str]:
    return (
        f"after {seconds:.0f} s not every node sees {printable(name)} on the disk that they share:"
        f" {APART}",
        "look at it there: orchestrator exec -- ls -l DIRECTORY; a network disk that is mounted"
        " with actimeo=1 lags less",
    )
