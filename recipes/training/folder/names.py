"""The names of the files in a run's folder. Imports nothing heavy, so that runs are listed at once.

The recipe's is in :mod:`largebatch.recipes.schema.names`.
"""

from __future__ import annotations

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
ENDING = "ending.json"
#: Names of the classes, one in a line, in the order of the model's outputs.
CLASSES = "classes.txt"
CHECKPOINTS = "checkpoints"
#: The file of a checkpoint's folder that makes it complete.
STATE = "state.json"
#: A finished run's weights, and their moving average if there is one.
WEIGHTS, WEIGHTS_EMA = "weights.pt", "weights_ema.pt"
LOCK = ".lock"
