"""Names that recipes are checked against, in a module that does not load torch."""

#: The dialects; ``DIALECTS`` has them by these names.
DIALECT_NAMES = ("mlperf", "mlperf-corrected", "torch", "larc", "simclr-popular")

#: The denominators of the trust ratio, ||g|| + l ||w|| and ||g + l w||.
DENOMINATORS = ("sum-of-norms", "norm-of-sum")
