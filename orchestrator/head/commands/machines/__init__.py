"""What the machines of the node list are, who uses them, and what they did wrong before."""
