"""Move files between this machine and the nodes, and from node to node."""
