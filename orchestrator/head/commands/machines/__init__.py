"""Commands that tell what the machines of the node list are, and who uses them."""
