"""What a predicted time rests on: each input, how far it may be off, and what that changes.

The simulation of a step is optimistic: it knows neither the kernels' start-up nor stragglers. Of 15
published scaling efficiencies (:data:`PUBLISHED`) it predicts more than was reached in each, most
where a GPU has few images. Two losses span all but a few of them, and are varied together: a time
per step that does not shrink with the images, and a share of the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...comm import Level, Links
from .presets import Gpu

#: Published scaling efficiencies beside those that the simulation predicts with its best plan.
#: [S] but for MLPerf's, which are [C] from minutes and stop epochs, relative to 8 GPUs, with
#: evaluation.
PUBLISHED: tuple[tuple[str, float, float], ...] = (
    ("Goyal et al. 2017, 256 P100", 0.90, 0.999),
    ("Akiba et al. 2017, 1,024 P100", 0.80, 0.945),
    ("Horovod, 512 P100, ResNet-101", 0.90, 0.989),
    ("Horovod, 512 P100, Inception V3", 0.90, 0.983),
    ("Horovod, 512 P100, VGG-16", 0.68, 0.818),
    ("NVIDIA's examples, PyTorch, 8 V100", 0.867, 0.998),
    ("NVIDIA's examples, PyTorch, 8 A100", 0.841, 0.998),
    ("NVIDIA's examples, MXNet, 8 A100", 0.978, 0.999),
    ("NVIDIA's examples, MXNet, 16 V100", 0.90, 0.999),
    ("MLPerf, 64 H100, 50 images each", 0.67, 0.989),
    ("MLPerf, 3,584 H100, 16 images each", 0.358, 0.845),
    ("MLPerf, 64 A100, 204 images each", 0.834, 0.993),
    ("MLPerf, 1,024 A100, 35 images each", 0.669, 0.986),
    ("MLPerf, 4,216 A100, 16 images each", 0.419, 0.929),
    ("MLPerf, 512 V100, 65 images each", 0.891, 0.997),
)

#: Time per step that does not depend on the images: [C] t = t0 + s x images through two sizes of
#: MLPerf's clusters gives 4.0 ms for H100 and 5.8 ms for A100.
LOST_SECONDS = 5.8e-3
#: Share of the speed that the ranks of one node keep: NVIDIA's PyTorch example on 8 A100.
KEPT_SHARE = 0.841 / 0.998

#: Throughput of evaluation relative to training: a forward pass is a third of the operations.
EVALUATION_SPEED = 3.0


@dataclass(frozen=True)
class Rates:
    """The inputs of a predicted time that may be varied.

    Attributes:
        images_per_second: Training throughput of one GPU.
        latency: Factor on the latencies of the links.
        bandwidth: Factor on their rates.
        lost_seconds: Time of each step that the simulation leaves out.
        kept: Share of the simulated speed that is kept.
        evaluation_images_per_second: Throughput of one GPU in evaluation.
        evaluation_start_seconds: Time of an evaluation besides its images.
        checkpoint_bytes_per_second: Rate at which checkpoints are written.
        checkpoint_start_seconds: Time of a checkpoint besides its bytes.
    """

    images_per_second: float
    evaluation_images_per_second: float
    latency: float = 1.0
    bandwidth: float = 1.0
    lost_seconds: float = 0.0
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
    rates: Rates, gpu: Gpu | None, *, given: bool, given_evaluation: bool, given_checkpoint: bool
) -> list[Assumption]:
    """List the assumptions behind a prediction.

    Args:
        rates: The inputs.
        gpu: The preset that the throughput is from, or may be compared with.
        given: Whether the user gave the throughput of training.
        given_evaluation: Whether the user gave that of evaluation.
        given_checkpoint: Whether the user gave the time of a checkpoint.
    """
    rate = rates.images_per_second
    if given or gpu is None:
        low, high, why = 0.95 * rate, 1.05 * rate, "assumed of a measured rate"
    else:
        (low, high), why = gpu.between, gpu.between_source
    follows = rates.evaluation_images_per_second / rate

    def at(value: float) -> Rates:
        # Evaluation follows the rate of training unless it was given.
        evaluated = rates.evaluation_images_per_second if given_evaluation else follows * value
        return replace(rates, images_per_second=value, evaluation_images_per_second=evaluated)

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
            f"up to {1e3 * LOST_SECONDS:g} ms per step and {1 - KEPT_SHARE:.0%} of the speed, as "
            "in published runs",
            rates,
            replace(rates, lost_seconds=LOST_SECONDS, kept=KEPT_SHARE),
        ),
        Assumption(
            "speed of the links",
            "as listed",
            "latencies 1/3 to 2 times, rates 0.6 to 1 times: NCCL's protocols, line rates",
            replace(rates, latency=1 / 3),
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


def optimism() -> str:
    """One line on how far published efficiencies were from those that the simulation predicts."""
    ratios = sorted(published / predicted for _, published, predicted in PUBLISHED)
    middle = ratios[len(ratios) // 2]
    return (
        f"The simulation is optimistic: {len(ratios)} published efficiencies were "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} times (median {middle:.2f}) the predicted ones, "
        "least where a GPU has few images per step."
    )
