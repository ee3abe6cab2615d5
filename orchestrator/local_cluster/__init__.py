"""A cluster of real SSH servers on this machine, and the demo that runs on it."""
