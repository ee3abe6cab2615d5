"""Ask a running job for a profile, read the traces, and say what to change."""
