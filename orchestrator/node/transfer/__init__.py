"""Files sent to this node and fetched from it, the store of code, and its snapshots."""
