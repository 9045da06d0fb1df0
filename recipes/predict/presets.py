"""Presets of GPUs and links to simulate a step on, each with the source of its numbers.

``[S]``: read in the named source; ``[C]``: computed from such figures; ``[M]``: recalled from a
paper, not verified; ``assumed``: the line rate of the standard or vendor, or a guess that says so.
Latencies are those of NCCL's own model. Bus bandwidths inside a node are NCCL's own too
(src/graph/topo.h), and between nodes :data:`NETWORK_SHARE` of the line rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import RecipeError, but_valid

#: The model and image size for which the throughputs hold.
MODEL, IMAGE_SIZE = "resnet50", 224

#: Relative standard deviation of the time of a step over ranks. It and the times t0 of V100, A100
#: and H100 are fitted by benchmarks.comm.scaling to published runs, in scaling_points.py.
STRAGGLER_SIGMA = 0.024

#: Smallest and largest ratio of a published efficiency to the predicted one, of all those runs.
PUBLISHED_OVER_PREDICTED = (0.77, 1.14)
#: Number of those runs.
PUBLISHED_RUNS = 73

#: Share of a network's line rate that is measured as bus bandwidth: 40 GB/s on 4 EDR adapters.
NETWORK_SHARE = 0.8


class Rate(NamedTuple):
    """Training throughput of one GPU on :data:`MODEL` in PyTorch, as one of ``gpus``."""

    images_per_second: float
    images: int  # per GPU and step
    gpus: int
    source: str


class Fixed(NamedTuple):
    """Time of each step that does not shrink with the images, and for which images it holds."""

    seconds: float
    images: tuple[int, int]
    source: str


class Between(NamedTuple):
    """Throughput that may be expected instead: of a whole run, and with the fastest framework."""

    low: float
    high: float
    source: str


class Gpu(NamedTuple):
    """A GPU model: its speed, and what it is usually built with."""

    rate: Rate
    fixed: Fixed
    between: Between
    links: tuple[str, str]
    memory_gb: float  # 10^9 bytes
    #: Largest bus bandwidth of NCCL's trees on one or two nodes, and on more.
    tree_gbytes: tuple[float, float] = (110.0, 80.0)
    per_node: int = 8


_EXAMPLES = "[S] NVIDIA DeepLearningExamples, PyTorch 21.03, 8 GPUs with 256 images, AMP"
_AMPERE, _HOPPER = (130.0, 105.0), (619.0, 576.0)
_A100 = 16621 / 8
#: Memory bandwidth relative to an A100 of 80 GB: 3.35, 4.8 and 8 against 2.04 TB/s [M].
_H100, _H200, _B200 = 1.64, 2.35, 3.92
#: 90 epochs of ImageNet in about 3 h on 8 A100 and 5 h on 8 V100.
_WHOLE_A100, _WHOLE_V100 = (90 * 1_281_167 / hours / 3600 / 8 for hours in (3, 5))
_LINE = "[C] line through MLPerf {}, less waiting"
_OF_H100 = Fixed(2.8e-3, (50, 400), "assumed: that of an H100")


def _by_bandwidth(factor: float) -> Rate:
    text = f"[C] PyTorch's rate of an A100 times {factor}, as its memory bandwidth: none published"
    return Rate(factor * _A100, 256, 8, text)


GPUS = {
    "p40": Gpu(
        Rate(218.0, 64, 1, "[M] Jia et al. 2018: mixed precision, 64 images at a time"),
        Fixed(0.0, (64, 64), "unknown, taken as 0: one batch size is published"),
        Between(142.0, 218.0, "[C] Jia et al. 2018: the whole run, 6.6 min on 2,048; [M] as above"),
        ("pcie3", "roce100"),
        24.0,
    ),
    "p100": Gpu(
        Rate(138.0, 32, 8, "[C] He et al.: 90 epochs on 8 of them in 29 h [S], FP32"),
        Fixed(36e-3, (32, 64), "[C] line through tensorflow.org's 195 and 219 images/s, FP32"),
        Between(110.0, 219.0, "assumed: 20 % less; [S] tensorflow.org's benchmarks"),
        ("nvlink1", "fdr"),
        16.0,
    ),
    "v100": Gpu(
        Rate(8322 / 8, 256, 8, _EXAMPLES),
        Fixed(12.5e-3, (65, 256), _LINE.format("0.6's and 0.7's 16 x 208 and 512 x 65 images")),
        Between(_WHOLE_V100, 11368 / 8, "[S] the same: 90 epochs in ~5 h; MXNet, DGX-2"),
        ("nvlink2", "edr-x2"),
        16.0,
    ),
    "a100": Gpu(
        Rate(_A100, 256, 8, _EXAMPLES),
        Fixed(4.1e-3, (35, 408), _LINE.format("2.0's 8 x 408 and 1,024 x 35 images")),
        Between(_WHOLE_A100, 27190 / 8, "[S] the same: 90 epochs in ~3 h; MXNet, MLPerf 2.0"),
        ("nvlink3", "hdr-x8"),
        80.0,
        _AMPERE,
    ),
    "h100": Gpu(
        _by_bandwidth(_H100),
        Fixed(2.8e-3, (50, 400), _LINE.format("3.1's 8 x 400 and 64 x 50 images")),
        Between(_H100 * _WHOLE_A100, 7054.0, "[C] as that of an A100's ~3 h; [S] MXNet, MLPerf"),
        ("nvlink4", "ndr-x8"),
        80.0,
        _HOPPER,
    ),
    "h200": Gpu(
        _by_bandwidth(_H200),
        _OF_H100,
        Between(_H200 * _WHOLE_A100, 1.43 * 7054, "[C] those of an H100 by memory bandwidth"),
        ("nvlink4", "ndr-x8"),
        141.0,
        _HOPPER,
    ),
    "b200": Gpu(
        _by_bandwidth(_B200),
        _OF_H100,
        Between(
            _H100 * _A100, 2.4 * 7054, "assumed: that of an H100; 2.4 times MXNet's of an H100"
        ),
        ("nvlink5", "ndr-x8"),
        180.0,
        _HOPPER,
    ),
}


@dataclass(frozen=True)
class Link:
    """A link, per GPU inside a node and per node between nodes."""

    gbit: float  # line rate, per second
    source: str
    bus: float | None = None  # measured, as `bus_gbytes`; None: a share of the line rate
    nics: int = 1  # adapters of a node

    @property
    def bus_gbytes(self) -> float:
        """Bus bandwidth in 10^9 bytes per second."""
        return NETWORK_SHARE * self.gbit / 8 if self.bus is None else self.bus


#: Links inside a node, by name.
INTRA = {
    "pcie3": Link(126.0, "assumed: 16 lanes of 8 GT/s", 12.0),
    "pcie4": Link(252.0, "assumed: 16 lanes of 16 GT/s", 24.0),
    "nvlink1": Link(640.0, "assumed: P100, 4 links of 20 GB/s each way", 72.0),
    "nvlink2": Link(1200.0, "assumed: V100, 6 links of 25 GB/s each way", 120.0),
    "nvlink3": Link(2400.0, "assumed: A100, 12 links of 25 GB/s each way", 235.0),
    "nvlink4": Link(3600.0, "assumed: H100, 18 links of 25 GB/s each way", 370.8),
    "nvlink5": Link(7200.0, "assumed: B200, 18 links of 50 GB/s each way", 721.8),
}

#: Links between nodes, by name.
INTER = {
    "eth10": Link(10.0, "assumed: 10 Gbit/s Ethernet"),
    "eth25": Link(25.0, "[S] Tencent's 128 V100 of 2020: 25 Gbit/s"),
    "eth50": Link(50.0, "[S] Goyal et al. 2017: 50 Gbit/s"),
    "roce100": Link(100.0, "[S] Jia et al. 2018: 100 Gbit/s RoCE v2"),
    "fdr": Link(54.5, "assumed: InfiniBand FDR, 4 lanes"),
    "fdr-x2": Link(109.0, "[S] two FDR per node, as in Akiba et al. 2017", nics=2),
    "edr": Link(100.0, "assumed: InfiniBand EDR"),
    "edr-x2": Link(200.0, "[S] two EDR per node, as in Sony's cluster of 2018", nics=2),
    "edr-x4": Link(400.0, "assumed: 4 InfiniBand EDR per node", nics=4),
    "edr-x8": Link(800.0, "assumed: 8 InfiniBand EDR per node", nics=8),
    "hdr-x2": Link(400.0, "[S] two HDR per node, as in Dell's XE8545", nics=2),
    "hdr-x8": Link(1600.0, "[S] 8 HDR per node, as in NVIDIA's DGX A100", nics=8),
    "ndr": Link(400.0, "assumed: one InfiniBand NDR or 400 Gbit/s Ethernet per node"),
    "ndr-x8": Link(3200.0, "assumed: 8 InfiniBand NDR per node", nics=8),
}


def links_named(text: str) -> tuple[str, str]:
    """Split ``INTRA+INTER``, such as ``nvlink2+edr-x2``, into the names of two known links."""
    intra, plus, inter = text.partition("+")
    for name, table, where in ((intra, INTRA, "inside a node"), (inter, INTER, "between nodes")):
        if not plus or name not in table:
            raise RecipeError(
                f"--links: {text!r} has no known link {where}{but_valid(name, list(table))}: "
                f"INTRA+INTER with INTRA from {', '.join(INTRA)} and INTER from "
                f"{', '.join(INTER)}"
            )
    return intra, inter
