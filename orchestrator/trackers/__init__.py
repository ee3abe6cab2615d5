"""Trackers by name: TensorBoard, W&B, MLflow, each imported only when asked for."""
