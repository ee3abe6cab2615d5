"""What a job needs for its further attempts: the nodes that it can have, and their parts."""
