"""The parts of a supervisor: how its job ends, its ranks, what they print, and who listens."""
