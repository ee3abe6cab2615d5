"""Files that come to this node and go from it, the store of code, and snapshots made of it."""
