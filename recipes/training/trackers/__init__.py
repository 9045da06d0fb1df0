"""Callbacks that send a run's metrics to TensorBoard, Weights & Biases or MLflow."""
