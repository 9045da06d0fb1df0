"""From encoded bytes to batches of pixels: what is cropped, and by which back end."""
