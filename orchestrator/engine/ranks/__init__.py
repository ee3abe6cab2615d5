"""Who is there and which ranks share what: process groups, meshes, collectives."""
