"""States in the memory of the nodes, which outlive the ranks."""
