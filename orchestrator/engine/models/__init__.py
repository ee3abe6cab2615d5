"""The built-in models and losses, and how a user's own are found."""
