"""Says what was brought, what was not, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from orchestrator.common.text import duration, plural, size
from orchestrator.head.nodes.facts import listed
from orchestrator.head.saved.decide import Decision, Load
from orchestrator.head.saved.view import Key, View
from orchestrator.head.screen.output import printable
from orchestrator.protocol.saved_names import is_saved

EACH_ITS_OWN = (
    "each keeps its own, and its ranks may go on from another state, unless the program makes them"
    " equal; save on rank 0 alone, or give the file a name with the rank in it"
)
APART = "its ranks would begin anew, or from an older state, beside those that go on"
LEAVE_OUT = (
    "; what no rank reads again is left out if its name, or that of its directory, begins with a"
    " dot, or with tmp"
)
MEND = f"mend that, and launch again{LEAVE_OUT}"
LARGE = f"orchestrator.distributed.copy_to_nodes(path) in the program brings it{LEAVE_OUT}"
HALF = (
    "it was being written when its rank ended, and is not brought to others: save under another"
    " name and os.replace() it, so that a whole one is always there"
)


def named(keys: Collection[Key], views: Sequence[View]) -> str:
    """Name the newest checkpoint among files, and say how many there are."""
    times = {key: file.changed for view in views for key, file in view.files.items()}
    newest = max(keys, key=lambda key: (is_saved(key.name), times.get(key, 0), key))
    first = printable(str(newest))
    return f"{first} and {len(keys) - 1} more" if len(keys) > 1 else first


def lacking(loads: Sequence[Load], views: Sequence[View], failed: Mapping[int, str]) -> str:
    """Say what nodes do not have as others have it, and why."""
    said = []
    for target, why in sorted(failed.items()):
        keys = {load.key for load in loads if load.target == target}
        sources = listed(
            [views[n].name for n in sorted({x.source for x in loads if x.key in keys})]
        )
        what = f"{named(keys, views)}, as {sources} has it" if keys else "the last removals"
        said.append(f"{views[target].name} does not have {what} ({printable(why)})")
    return f"{'; '.join(said)}: {APART}"


def begins(loads: Sequence[Load], views: Sequence[View]) -> str:
    """Say what is about to take a while."""
    takers = listed([views[node].name for node in sorted({load.target for load in loads})])
    what = named({load.key for load in loads}, views)
    return f"bringing {what} ({size(of_all(loads, views))}) to {takers}"


def of_all(loads: Sequence[Load], views: Sequence[View]) -> int:
    """Return how many bytes they are, each once."""
    return sum({load.key: views[load.source].files[load.key].size for load in loads}.values())


def come(loads: Sequence[Load], views: Sequence[View], took: float) -> str:
    """Say what all have now, and who had it."""
    keys = {load.key for load in loads}
    sources, targets = {load.source for load in loads}, {load.target for load in loads}
    givers = listed([views[node].name for node in sorted(sources)])
    takers = listed([views[node].name for node in sorted(targets)])
    what = f"{named(keys, views)} ({size(of_all(loads, views))})"
    if targets <= sources:
        who = f"{givers} each had a part of {what}: each has all of it now"
    else:
        has = "has" if len(targets) == 1 else "have"
        who = f"only {givers} had {what}: {takers} {has} it now, too"
    older = sorted(load.key.name for load in loads if load.older)
    kept = f"; what was there is kept as .{older[0]}.1.before" if older else ""
    return f"{who}, in {duration(took)}, checksums compared{kept}"


def told(decision: Decision, views: Sequence[View]) -> Iterator[str]:
    """Say what nobody could decide."""
    if short := [view.name for view in views if view.files and not view.whole]:
        yield (
            f"WARNING: {listed(short)}: too many files to look at in the program's directory: what"
            " it saved may not all be on the other nodes"
        )
    for key, (node, before) in decision.restored.items():
        if not views[node].files[key].sound:
            yield (
                f"{printable(str(key))} on {views[node].name} lacks its end, as its rank ended"
                f" while it wrote it: what it was before, which {views[before].name} has, takes its"
                " place"
            )
    for key, node in list(decision.broken.items())[:1]:
        more = f" and {len(decision.broken) - 1} more" if len(decision.broken) > 1 else ""
        yield f"WARNING: {printable(str(key))}{more} on {views[node].name} lacks its end: {HALF}"
    for key, nodes in list(decision.unlike.items())[:1]:
        more = f" and {len(decision.unlike) - 1} more" if len(decision.unlike) > 1 else ""
        who = listed([views[node].name for node in nodes])
        what = f"{printable(str(key))}{more}"
        yield f"WARNING: {who} have each written another {what}: {EACH_ITS_OWN}"
    for by in sorted(set(decision.copies.values())):
        keys = {key for key, owner in decision.copies.items() if owner == by}
        yield (
            f"{by} is not there, and with it what it alone has saved since it was brought to"
            f" others: the ranks find {named(keys, views)} as it was then"
        )


def all_lost(away: Sequence[str]) -> str:
    return (
        f"WARNING: what the program saved on {listed(away)}, if anything, is not there, and no"
        " other node has files that it saved: its ranks begin anew."
        " orchestrator.distributed.copy_to_nodes(path) brings others at once what rank 0 saves"
    )


def too_much(loads: Sequence[Load], total: int, views: Sequence[View], most: int) -> str:
    sources = listed([views[n].name for n in sorted({load.source for load in loads})])
    return (
        f"saved on {sources} alone: {named({load.key for load in loads}, views)}"
        f" ({plural(len(loads), 'file')}, {size(total)}), which is more than the {size(most)} that"
        f" are brought to others: {APART}"
    )


def unseen(name: str, seconds: float) -> tuple[str, str]:
    return (
        f"after {seconds:.0f} s not every node sees {printable(name)} on the disk that they share:"
        f" {APART}",
        "look at it there: orchestrator exec -- ls -l DIRECTORY; a network disk that is mounted"
        " with actimeo=1 lags less",
    )
