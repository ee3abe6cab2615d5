"""`orchestrator warm`: what stays ready on the nodes between two jobs."""
