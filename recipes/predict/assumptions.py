"""What a predicted time rests on: each input, how far it may be off, and what that changes.

The simulation is compared with published scaling efficiencies that set none of its constants
(:data:`PUBLISHED`). What they differ by is varied as a share of the speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...comm import Level, Links, Nccl
from .presets import STRAGGLER_SIGMA, Gpu

#: Published scaling efficiencies that were kept apart from the fit of the model's constants, and
#: what it predicts for them: benchmarks/results/scaling.json, with all inputs and their sources.
PUBLISHED: tuple[tuple[str, float, float], ...] = (
    ("MLPerf 3.0, H100, 512 × 40", 0.585, 0.600),
    ("MLPerf 3.0, H100, 3,584 × 16", 0.358, 0.362),
    ("MLPerf 2.0, A100 (Dell), 128 × 128", 0.739, 0.840),
    ("MLPerf 2.0, A100, 4,216 × 16", 0.419, 0.476),
    ("MLPerf 0.7, A100, 768 × 45", 0.563, 0.754),
    ("MLPerf 0.7, V100, 512 × 65", 0.891, 0.898),
    ("Goyal et al., ResNet-50, 256 P100 × 32", 0.900, 0.972),
    ("Akiba et al., ResNet-50, 1,024 P100 × 32", 0.800, 0.843),
    ("Horovod, ResNet-101, 128 P100 × 64", 0.900, 0.882),
    ("Horovod, ResNet-101, 512 P100 × 64", 0.900, 0.862),
    ("Horovod, Inception V3, 128 P100 × 64", 0.900, 0.884),
    ("Horovod, Inception V3, 512 P100 × 64", 0.900, 0.860),
    ("Horovod, VGG-16, 128 P100 × 64", 0.790, 0.695),
    ("Horovod, VGG-16, 512 P100 × 64", 0.680, 0.658),
    ("Sony, ResNet-50, 1,088 V100 × 32", 0.916, 0.826),
    ("Kurth et al., DeepLabv3+, 27,360 V100 × 1", 0.907, 0.840),
    ("Jia et al., ResNet-50, 1,024 P40 × 64", 0.990, 0.911),
    ("Jia et al., ResNet-50, images assumed, 2,048 P40 × 64", 0.970, 0.900),
    ("Jia et al., ResNet-50, 2,048 P40 × 32", 0.879, 0.886),
    ("Jia et al., AlexNet-BN, 512 P40 × 128", 0.914, 0.910),
    ("Jia et al., AlexNet-BN, 1,024 P40 × 64", 0.804, 0.901),
)


@dataclass(frozen=True)
class Rates:
    """The inputs of a predicted time that may be varied.

    Attributes:
        images_per_second: Training throughput of one GPU.
        latency: Factor on the latencies of the links.
        bandwidth: Factor on their rates.
        fixed: Factor on the time of a step that does not shrink with the images.
        straggler_sigma: Relative standard deviation of the time of a step over ranks.
        kept: Share of the simulated speed that is kept on several GPUs.
        evaluation_images_per_second: Throughput of one GPU in evaluation.
        evaluation_start_seconds: Time of an evaluation besides its images.
        checkpoint_bytes_per_second: Rate at which checkpoints are written.
        checkpoint_start_seconds: Time of a checkpoint besides its bytes.
    """

    images_per_second: float
    evaluation_images_per_second: float
    latency: float = 1.0
    bandwidth: float = 1.0
    fixed: float = 1.0
    straggler_sigma: float = STRAGGLER_SIGMA
    kept: float = 1.0
    evaluation_start_seconds: float = 0.5
    checkpoint_bytes_per_second: float = 1e9
    checkpoint_start_seconds: float = 0.5

    def links(self, links: Links) -> Links:
        """Return links with the factors applied."""

        def changed(level: Level | None) -> Level | None:
            return level and Level(
                level.latency_seconds * self.latency, level.seconds_per_byte / self.bandwidth
            )

        return replace(links, intra=changed(links.intra), inter=changed(links.inter))

    def nccl(self, nccl: Nccl) -> Nccl:
        """Return the links as NCCL sees them with the factors applied."""
        return replace(
            nccl,
            intra_gbytes=nccl.intra_gbytes * self.bandwidth,
            inter_gbytes=nccl.inter_gbytes * self.bandwidth,
            intra_latency=nccl.intra_latency * self.latency,
            inter_latency=nccl.inter_latency * self.latency,
        )


@dataclass(frozen=True)
class Assumption:
    """An input, and what else it might be.

    Attributes:
        name: The input.
        used: Its value in the prediction, as text.
        otherwise: The values between which it may be, as text, with their source.
        low: The inputs with its value that makes a run shortest.
        high: The inputs with its value that makes a run longest.
    """

    name: str
    used: str
    otherwise: str
    low: Rates
    high: Rates


@dataclass(frozen=True)
class Effect:
    """What an assumption changes.

    Attributes:
        assumption: The assumption.
        low: Shortest time to train, in seconds.
        high: Longest time to train, in seconds.
    """

    assumption: Assumption
    low: float = field(default=0.0)
    high: float = field(default=0.0)

    @property
    def width(self) -> float:
        """Difference of the two times, in seconds."""
        return self.high - self.low


def assumptions(
    rates: Rates,
    gpu: Gpu | None,
    *,
    given: bool,
    given_evaluation: bool,
    given_checkpoint: bool,
    fixed_seconds: float = 0.0,
) -> list[Assumption]:
    """List the assumptions behind a prediction.

    Args:
        rates: The inputs.
        gpu: The preset that the throughput is from, or may be compared with.
        given: Whether the user gave the throughput of training.
        given_evaluation: Whether the user gave that of evaluation.
        given_checkpoint: Whether the user gave the time of a checkpoint.
        fixed_seconds: Time of a step that does not shrink with the images.
    """
    rate = rates.images_per_second
    if given or gpu is None:
        low, high, why = 0.95 * rate, 1.05 * rate, "assumed of a measured rate"
    else:
        # The preset's range holds at its images; at others, its ratio to the preset's throughput.
        low, high = (rate * value / gpu.images_per_second for value in gpu.between)
        why = gpu.between_source
    follows = rates.evaluation_images_per_second / rate

    def at(value: float) -> Rates:
        # Evaluation follows the rate of training unless it was given.
        evaluated = rates.evaluation_images_per_second if given_evaluation else follows * value
        return replace(rates, images_per_second=value, evaluation_images_per_second=evaluated)

    slower, *_, faster = _ratios()
    evaluated = rates.evaluation_images_per_second
    slowest, fastest = (0.95, 1.05) if given_evaluation else (1 / 3, 1.0)
    found = [
        Assumption(
            "speed of one GPU",
            f"{rate:,.0f} images/s",
            f"{low:,.0f} to {high:,.0f}: {why}",
            at(high),
            at(low),
        ),
        Assumption(
            "what the simulation leaves out",
            "nothing",
            f"{slower:.2f} to {faster:.2f} times the speed, as in published runs on several GPUs",
            replace(rates, kept=faster),
            replace(rates, kept=slower),
        ),
        Assumption(
            "waiting for the slowest GPU",
            f"a GPU's time varies by {rates.straggler_sigma:.1%}",
            "0 to twice as much: assumed",
            replace(rates, straggler_sigma=0.0),
            replace(rates, straggler_sigma=2 * rates.straggler_sigma),
        ),
        Assumption(
            "speed of the links",
            "as listed",
            "latencies 1/3 to 2 times, bandwidths 0.6 to 1.25 times: assumed; line rates",
            replace(rates, latency=1 / 3, bandwidth=1.25),
            replace(rates, latency=2.0, bandwidth=0.6),
        ),
        Assumption(
            "speed of evaluation",
            f"{evaluated:,.0f} images/s of one GPU",
            f"{slowest * evaluated:,.0f} to {fastest * evaluated:,.0f}"
            + ("" if given_evaluation else ": where decoding limits it, that of training"),
            replace(rates, evaluation_images_per_second=fastest * evaluated),
            replace(rates, evaluation_images_per_second=slowest * evaluated),
        ),
        Assumption(
            "start of an evaluation",
            f"{rates.evaluation_start_seconds:g} s",
            "0.1 to 2 s: assumed; the loader starts anew",
            replace(rates, evaluation_start_seconds=0.1),
            replace(rates, evaluation_start_seconds=2.0),
        ),
    ]
    if fixed_seconds:
        found.append(
            Assumption(
                "time of a step besides its images",
                f"{1e3 * fixed_seconds:.2g} ms",
                "half to 1.5 times: assumed",
                replace(rates, fixed=0.5),
                replace(rates, fixed=1.5),
            )
        )
    if given_checkpoint:
        start = rates.checkpoint_start_seconds
        used, otherwise = f"{start:g} s", "half to twice: assumed"
        shortest = replace(rates, checkpoint_start_seconds=start / 2)
        longest = replace(rates, checkpoint_start_seconds=2 * start)
    else:
        used, otherwise = "0.5 s and 1 GB/s", "0.1 s and 4 GB/s to 2 s and 0.2 GB/s: assumed"
        shortest = replace(rates, checkpoint_start_seconds=0.1, checkpoint_bytes_per_second=4e9)
        longest = replace(rates, checkpoint_start_seconds=2.0, checkpoint_bytes_per_second=0.2e9)
    return [*found, Assumption("time of a checkpoint", used, otherwise, shortest, longest)]


def effects(found: list[Assumption], seconds: Callable[[Rates], float]) -> list[Effect]:
    """Return what each assumption changes, the one that changes most first.

    Args:
        found: The assumptions.
        seconds: Returns the time to train for some inputs.
    """
    each = [Effect(a, seconds(a.low), seconds(a.high)) for a in found]
    return sorted(each, key=lambda effect: -effect.width)


def _ratios() -> list[float]:
    """Published efficiencies relative to the predicted ones, ascending."""
    return sorted(published / predicted for _, published, predicted in PUBLISHED)


def compared_with_published() -> str:
    """One line on how far published efficiencies are from those that the simulation predicts."""
    ratios = _ratios()
    return (
        f"{len(ratios)} published efficiencies that set no constant of the simulation were "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} times (median {statistics.median(ratios):.2f}) the "
        "predicted ones."
    )
