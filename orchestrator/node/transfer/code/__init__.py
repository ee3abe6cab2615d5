"""The contents of files that are kept here by their digests, and the snapshots made of them."""
