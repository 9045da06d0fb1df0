"""From encoded bytes to batches of pixels: the crops, and the backends that decode them."""
