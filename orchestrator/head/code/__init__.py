"""The working tree: list it, know its contents by digest, send it to the nodes, compare it."""
