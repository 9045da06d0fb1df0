"""The price of a large batch: how many more epochs it needs than a small one, from short runs."""
