"""The folder of a run: what a run leaves there, and who reads it."""
