"""Everything that head, nodes and supervisors say to each other, typed, in one place.

Shipped to the nodes, so it is standard library only and runs on Python 3.9. `docs/protocol.md` says
who sends what to whom.
"""
