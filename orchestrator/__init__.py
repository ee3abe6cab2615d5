"""Train PyTorch models on machines that you reach only by SSH."""

__version__ = "0.1.0"
