"""How a model is spread over the ranks: its blocks, their order, their copies."""
