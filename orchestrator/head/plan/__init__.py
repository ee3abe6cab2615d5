"""Facts go in, and what each node will run comes out: pure functions."""
