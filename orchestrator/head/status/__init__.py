"""What runs where, asked from the nodes; logs that this head has not fetched yet."""
