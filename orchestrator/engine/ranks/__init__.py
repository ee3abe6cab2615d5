"""Process groups and collectives: the ranks, and what they share."""
