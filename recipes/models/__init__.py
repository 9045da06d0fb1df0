"""Models by name, their optimizers, and batch norm over the images that a recipe asks for."""
