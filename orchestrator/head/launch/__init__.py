"""From a request to a running job: reach the nodes, plan, check, record, start."""
