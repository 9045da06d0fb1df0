"""The schema of a recipe: its keys, how a recipe is found, loaded and checked."""
