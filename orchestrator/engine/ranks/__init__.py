"""Process groups, meshes and collectives: the ranks, and what they share."""
