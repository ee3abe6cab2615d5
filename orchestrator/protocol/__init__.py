"""All messages between head, nodes and supervisors, typed, in one place.

Shipped to the nodes, so it is standard library only and runs on Python 3.9. `docs/protocol.md`
lists the senders and receivers.
"""
