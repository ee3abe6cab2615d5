"""The same job through somebody else's launcher."""
