"""The working tree: list it, know its contents by digest, keep it with the experiment."""
