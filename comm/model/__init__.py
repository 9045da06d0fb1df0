"""The cost model: predicted times of an all-reduce and of a training step."""
