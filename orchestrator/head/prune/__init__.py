"""Which old experiments go, and how they are removed."""
