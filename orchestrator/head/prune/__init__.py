"""Choose old experiments, and remove them."""
