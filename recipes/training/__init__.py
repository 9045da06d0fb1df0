"""Training a recipe: the trainer, and the components that it builds and drives."""
