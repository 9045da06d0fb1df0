"""Train ImageNet models at very large batch sizes with PyTorch.

The parts are subpackages, each usable alone: :mod:`largebatch.lars`, :mod:`largebatch.amp`,
:mod:`largebatch.comm`, :mod:`largebatch.pipeline`, and above them :mod:`largebatch.recipes`.
Importing this package imports none of them.
"""

__version__ = "0.1.0"
