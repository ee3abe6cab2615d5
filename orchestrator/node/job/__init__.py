"""One job's processes on this node: supervisor, keeper and rank, and how they end."""
