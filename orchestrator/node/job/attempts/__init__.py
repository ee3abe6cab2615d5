"""The attempts of one job on a node: what they share, and which belong together."""
