"""Start a job and its further attempts: find nodes, bring what they lack, plan, check, start."""
