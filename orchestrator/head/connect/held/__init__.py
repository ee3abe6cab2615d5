"""SSH connections that stay open between commands, in a process of the user's own."""
