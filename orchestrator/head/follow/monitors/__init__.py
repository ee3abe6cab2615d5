"""Watch a running job: hangs, ranks that hold the others up, nodes that cannot reach each other."""
