"""The same virtual environment on every node: requirements, wheels, and their way to the nodes."""
