"""Find the nodes that a further attempt can have, and give them their parts."""
