"""Views of what jobs do and did: each is a command, and needs packages of its own."""
