"""One page that shows what jobs did: curves, ranks, events, nodes, config, logs."""
