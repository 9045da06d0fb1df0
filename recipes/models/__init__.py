"""Models, optimizers, and the images over which batch norm takes its statistics."""
