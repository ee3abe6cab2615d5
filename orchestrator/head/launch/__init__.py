"""From a request to a running job: reach the nodes, check, record, start."""
