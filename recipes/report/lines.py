"""The lines of a run's metrics, as :mod:`largebatch.recipes.training.folder.outcome` reads them."""

from __future__ import annotations

from ..files import number as number
from ..training.folder.outcome import Line as Line
