"""The search for a recipe's peak learning rate and warm-up."""
