"""Old experiments: which go, which stay and why, and their removal."""
