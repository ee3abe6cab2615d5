"""Files from node to node: signed frames, one side that gives, and one that takes."""
