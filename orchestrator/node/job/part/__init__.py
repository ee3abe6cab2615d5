"""The parts of a supervisor: the end of its job, its ranks, their output, and its listeners."""
