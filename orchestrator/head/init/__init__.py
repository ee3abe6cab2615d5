"""`orchestrator init`: the node list, made from machines that this login can reach."""
