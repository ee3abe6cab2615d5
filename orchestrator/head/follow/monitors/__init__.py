"""Watch a running job for hangs, slow GPUs, and nodes that cannot connect to each other."""
