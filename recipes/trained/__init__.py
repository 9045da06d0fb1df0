"""What is done with trained weights: find them and their recipe, evaluate and export them."""
