"""The same from Python: Cluster and Job."""
