"""Ask a running job for traces, sum them up in a table, and join them for Perfetto."""
