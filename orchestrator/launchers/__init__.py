"""The same job through another launcher."""
