"""Traces of torch's profiler: what the time of each rank's steps went into."""
