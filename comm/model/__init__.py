"""The cost model: predicts the time of an all-reduce and of a training step, and chooses rules."""
