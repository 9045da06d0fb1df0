"""Names that a recipe is checked with, which load nothing."""

#: The all-reduce algorithms; ``ALGORITHMS`` has them by these names.
ALGORITHM_NAMES = (
    "ring",
    "hierarchical",
    "leader",
    "torus",
    "halving-doubling",
    "parameter-server",
)
