"""The one reader of what a run said: what its ranks measure, and what its nodes' samplers tell."""
