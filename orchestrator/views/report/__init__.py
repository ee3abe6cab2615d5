"""One HTML page of jobs: curves, ranks, events, nodes, config, logs."""
