"""All-reduce algorithms by name."""

from .base import Algorithm, Phased
from .halving_doubling import HalvingDoubling
from .leader import Leader
from .parameter_server import ParameterServer
from .ring import Ring
from .torus import Hierarchical, Torus, TwoLevel

#: Every algorithm, in its default form.
ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Ring(),
        Hierarchical(),
        Leader(),
        Torus(),
        HalvingDoubling(),
        ParameterServer(),
    )
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "HalvingDoubling",
    "Hierarchical",
    "Leader",
    "ParameterServer",
    "Phased",
    "Ring",
    "Torus",
    "TwoLevel",
]
