"""What a recipe may say: its keys, how it is found, loaded and checked."""
