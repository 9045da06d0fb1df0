"""The trainer, and what it is built from."""
