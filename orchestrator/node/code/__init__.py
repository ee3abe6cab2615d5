"""The code that jobs run on this node: contents by their digest, and a snapshot for each launch."""
