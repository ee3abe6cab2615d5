"""The live view: all nodes, who uses them, and how far each job is."""
