"""The names of decoding backends and of error policies."""

#: Backends that decode and transform images.
BACKENDS = ("dali-gpu", "nvimgcodec", "dali-cpu", "torchvision")

#: What to do about images that cannot be used.
ON_ERROR = ("stop", "skip")
