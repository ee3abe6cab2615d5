"""Views of jobs: each is a command, and needs packages of its own."""
