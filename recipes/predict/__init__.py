"""Predictions before a run: its learning-rate schedule, and its speed on clusters of any size."""
