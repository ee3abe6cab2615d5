"""The node list, and the facts that each node reports about itself."""
