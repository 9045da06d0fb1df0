"""Predict the time to the same loss by batch size and cluster, as ``comm simulate`` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....comm import Plan
from ...errors import RecipeError
from ...predict.scaling import Setting, setting
from ...schema.load import Loaded
from .prices import Price


@dataclass(frozen=True)
class Gpus:
    """The clusters to predict for; the names are those of the command's options.

    Attributes:
        numbers: Numbers of GPUs.
        gpu: Name of a preset.
        links: Names of presets, ``INTRA+INTER``.
        measured: Throughput of one GPU or of a node, in place of the preset's.
        fitted: File of fitted links, in place of presets.
    """

    numbers: tuple[int, ...] = ()
    gpu: str | None = None
    links: str | None = None
    measured: str | None = None
    fitted: Path | None = None

    def check(self, loaded: Loaded) -> None:
        """Check that a step can be predicted, before anything is trained for it.

        Raises:
            RecipeError: An option is unknown or missing, or GPUs do not fill nodes.
        """
        given = self.arguments()
        if given and not self.numbers:
            raise RecipeError(
                f"{given[0]}: predicts nothing by itself; valid: together with --gpus"
            )
        for number in self.numbers:
            _step_seconds(self._setting(loaded, 1), number)

    def arguments(self) -> list[str]:
        """The options as the command takes them."""
        found = []
        for option, value in (
            ("--gpus", ",".join(map(str, self.numbers)) or None),
            ("--gpu", self.gpu),
            ("--links", self.links),
            ("--measured", self.measured),
            ("--fitted", self.fitted),
        ):
            if value is not None:
                found += [option, str(value)]
        return found

    def hours(self, loaded: Loaded, found: Sequence[Price]) -> dict[int, dict[int, float]]:
        """Hours of training to the target, by number of GPUs and batch size.

        Batch sizes that do not divide among the GPUs are left out.
        """
        return {
            number: {
                price.batch_size: price.updates[0]
                / 3600
                * _step_seconds(self._setting(loaded, price.batch_size // number), number)
                for price in found
                if price.batch_size % number == 0
            }
            for number in self.numbers
        }

    def _setting(self, loaded: Loaded, images_per_gpu: int) -> Setting:
        return setting(
            loaded,
            gpu=self.gpu,
            links=self.links,
            measured=self.measured,
            images_per_gpu=images_per_gpu,
            fitted=self.fitted,
        )


def _step_seconds(common: Setting, gpus: int) -> float:
    if gpus == 1:
        return common.profile.compute_seconds
    return common.simulate(common.profile, gpus, Plan.single("ring")).step_seconds
