"""Every request of a head to a node with its answer: a module for each room of the node."""
