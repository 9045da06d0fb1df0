"""What a person sees of a training run: its opening, its lines and its closing."""
