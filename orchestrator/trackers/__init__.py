"""Trackers by name: TensorBoard, W&B, MLflow, trackio, each imported only when asked for."""
