"""Presets of GPUs and links to simulate a step on, each with the source of its numbers.

``[S]``: read in the named source; ``[C]``: computed from such figures; ``[M]``: recalled from a
paper, not verified; ``assumed``: the line rate of the standard or vendor, or a guess that says so.
Latencies are those of NCCL's own model (src/graph/tuning.cc, about version 2.8): by its Simple
protocol 3.4 us over NVLink, 5.7 us over PCIe, 9.6 us over the network. Bus bandwidths inside a node
are NCCL's own too (src/graph/topo.h), and between nodes :data:`NETWORK_SHARE` of the line rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...comm import Level, StepTime, straggler_slowdown
from ..errors import RecipeError, did_you_mean

#: The model and image size for which the throughputs hold.
MODEL, IMAGE_SIZE = "resnet50", 224

#: Relative standard deviation of the time of a step over ranks. It and the times t0 of the A100 and
#: H100 are fitted by benchmarks.comm.scaling to the published points that may set constants.
STRAGGLER_SIGMA = 0.024

#: Share of a network's line rate that is measured as bus bandwidth: 40 GB/s on 4 EDR adapters.
NETWORK_SHARE = 0.8


@dataclass(frozen=True)
class Gpu:
    """A GPU model.

    Attributes:
        images_per_second: training throughput of one GPU on :data:`MODEL`, as one of ``gpus``.
        source: source of the throughput.
        images: images per GPU and step at which the throughput was measured.
        gpus: number of GPUs on which it was measured.
        fixed_seconds: time of each step that does not shrink with the images.
        fixed_source: source of that time.
        fitted: smallest and largest number of images per GPU for which that time holds.
        links: names of the usual links inside and between nodes.
        between: smallest and largest throughput that may be expected instead, with any framework.
        between_source: source of these two.
        memory_gb: memory in 10^9 bytes, of the GPU with that throughput.
        per_node: usual number of GPUs per node.
        tree_gbytes: largest bus bandwidth of NCCL's trees on one or two nodes, and on more.
    """

    images_per_second: float
    source: str
    images: int
    gpus: int
    fixed_seconds: float
    fixed_source: str
    fitted: tuple[int, int]
    links: tuple[str, str]
    between: tuple[float, float]
    between_source: str
    memory_gb: float
    per_node: int = 8
    tree_gbytes: tuple[float, float] = (110.0, 80.0)

    @property
    def step_time(self) -> StepTime:
        """The time of a step on one GPU, without waiting for others."""
        alone = self.images_per_second * straggler_slowdown(self.gpus, STRAGGLER_SIGMA)
        return StepTime.at(self.images, alone, self.fixed_seconds)


_AMPERE, _HOPPER = (130.0, 105.0), (619.0, 576.0)
_LINE_A100 = "[C] line through MLPerf 2.0's 8 x 408 and 1,024 x 35 images, less waiting"
_LINE_H100 = (
    "[C] line through MLPerf 3.1's 8 x 400 and 64 x 50 images, less waiting; one node of 4 with "
    "400 and 816 images gives the same"
)

GPUS = {
    "p40": Gpu(
        218.0,
        "[M] Jia et al. 2018: mixed precision, 64 images at a time",
        64,
        1,
        0.0,
        "unknown, taken as 0: one batch size is published",
        (64, 64),
        ("pcie3", "roce100"),
        (142.0, 218.0),
        "[C] Jia et al. 2018: the whole run on 2,048 of them, 6.6 min; [M] as above",
        24.0,
    ),
    "p100": Gpu(
        138.0,
        "[C] He et al.: 90 epochs on 8 of them in 29 h [S], FP32",
        32,
        8,
        36e-3,
        "[C] line through tensorflow.org's 195 images/s at 32 and 219 at 64, FP32",
        (32, 64),
        ("nvlink1", "fdr"),
        (110.0, 219.0),
        "assumed: 20 % less; [S] tensorflow.org's benchmarks",
        16.0,
    ),
    "v100": Gpu(
        8322 / 8,
        "[S] NVIDIA DeepLearningExamples, PyTorch 21.03, 8 V100 16 GB with 256 images, AMP",
        256,
        8,
        4.3e-3,
        "assumed: that of an A100",
        (35, 408),
        ("nvlink2", "edr-x2"),
        (8056 / 8, 11368 / 8),
        "[S] the same examples: PyTorch, V100 32 GB; MXNet, DGX-2",
        16.0,
    ),
    "a100": Gpu(
        16621 / 8,
        "[S] NVIDIA DeepLearningExamples, PyTorch 21.03, 8 A100 80 GB with 256 images, AMP",
        256,
        8,
        4.3e-3,
        _LINE_A100,
        (35, 408),
        ("nvlink3", "hdr-x8"),
        (16621 / 8, 27164 / 8),
        "[S] as above; MXNet, MLPerf 2.0",
        80.0,
        tree_gbytes=_AMPERE,
    ),
    "h100": Gpu(
        7083.0,
        "[S] NVIDIA's MLPerf Training 3.1 log, MXNet, 8 H100 SXM with 400 images",
        400,
        8,
        3.4e-3,
        _LINE_H100,
        (50, 400),
        ("nvlink4", "ndr-x8"),
        (4900.0, 7083.0),
        "[C] roofline of an eager step in PyTorch; [S] as above",
        80.0,
        tree_gbytes=_HOPPER,
    ),
    "h200": Gpu(
        7083.0,
        "assumed: that of an H100, which has the same arithmetic",
        400,
        8,
        3.4e-3,
        "assumed: that of an H100",
        (50, 400),
        ("nvlink4", "ndr-x8"),
        (4900.0, 10130.0),
        "[C] as for an H100; [C] 1.43 times as much, as its memory bandwidth",
        141.0,
        tree_gbytes=_HOPPER,
    ),
    "b200": Gpu(
        14170.0,
        "assumed: twice that of an H100",
        400,
        8,
        3.4e-3,
        "assumed: that of an H100",
        (50, 400),
        ("nvlink5", "ndr-x8"),
        (7083.0, 16900.0),
        "assumed: that of an H100; 2.4 times as much, as its memory bandwidth [M]",
        180.0,
        tree_gbytes=_HOPPER,
    ),
}


@dataclass(frozen=True)
class Link:
    """A link.

    Attributes:
        latency_us: alpha, in microseconds.
        gbit: line rate in gigabits per second, per GPU inside a node and per node between nodes.
        source: source of the rate.
        bus: measured bus bandwidth in 10^9 bytes per second; None for :data:`NETWORK_SHARE` of the
            line rate.
        nics: number of adapters of a node, between nodes.
    """

    latency_us: float
    gbit: float
    source: str
    bus: float | None = None
    nics: int = 1

    @property
    def level(self) -> Level:
        """The link at line rate, in the form that the cost model takes."""
        return Level.of(self.latency_us, self.gbit)

    @property
    def bus_gbytes(self) -> float:
        """Bus bandwidth in 10^9 bytes per second."""
        return NETWORK_SHARE * self.gbit / 8 if self.bus is None else self.bus


_NVLINK, _PCIE, _NETWORK = 3.4, 5.7, 9.6

#: Links inside a node, by name.
INTRA = {
    "pcie3": Link(_PCIE, 126.0, "assumed: 16 lanes of 8 GT/s", 12.0),
    "pcie4": Link(_PCIE, 252.0, "assumed: 16 lanes of 16 GT/s", 24.0),
    "pcie5": Link(_PCIE, 504.0, "assumed: 16 lanes of 32 GT/s", 48.0),
    "nvlink1": Link(_NVLINK, 640.0, "assumed: P100, 4 links of 20 GB/s each way", 72.0),
    "nvlink2": Link(_NVLINK, 1200.0, "assumed: V100, 6 links of 25 GB/s each way", 120.0),
    "nvlink3": Link(_NVLINK, 2400.0, "assumed: A100, 12 links of 25 GB/s each way", 235.0),
    "nvlink4": Link(_NVLINK, 3600.0, "assumed: H100, 18 links of 25 GB/s each way", 370.8),
    "nvlink5": Link(_NVLINK, 7200.0, "assumed: B200, 18 links of 50 GB/s each way", 721.8),
}

#: Links between nodes, by name.
INTER = {
    "eth10": Link(_NETWORK, 10.0, "assumed: 10 Gbit/s Ethernet"),
    "eth25": Link(_NETWORK, 25.0, "[S] Tencent's 128 V100 of 2020: 25 Gbit/s"),
    "eth50": Link(_NETWORK, 50.0, "[S] Goyal et al. 2017: 50 Gbit/s"),
    "roce100": Link(_NETWORK, 100.0, "[S] Jia et al. 2018: 100 Gbit/s RoCE v2"),
    "fdr": Link(_NETWORK, 54.5, "assumed: InfiniBand FDR, 4 lanes"),
    "fdr-x2": Link(_NETWORK, 109.0, "[S] two FDR per node, as in Akiba et al. 2017", nics=2),
    "edr": Link(_NETWORK, 100.0, "assumed: InfiniBand EDR"),
    "edr-x2": Link(_NETWORK, 200.0, "[S] two EDR per node, as in Sony's cluster of 2018", nics=2),
    "edr-x4": Link(_NETWORK, 400.0, "assumed: 4 InfiniBand EDR per node", nics=4),
    "edr-x8": Link(_NETWORK, 800.0, "assumed: 8 InfiniBand EDR per node", nics=8),
    "hdr-x2": Link(_NETWORK, 400.0, "[S] two HDR per node, as in Dell's XE8545", nics=2),
    "hdr-x8": Link(_NETWORK, 1600.0, "[S] 8 HDR per node, as in NVIDIA's DGX A100", nics=8),
    "ndr": Link(_NETWORK, 400.0, "assumed: one InfiniBand NDR or 400 Gbit/s Ethernet per node"),
    "ndr-x8": Link(_NETWORK, 3200.0, "assumed: 8 InfiniBand NDR per node", nics=8),
    "slingshot-x4": Link(_NETWORK, 800.0, "assumed: 4 Slingshot of 200 Gbit/s per node", nics=4),
}


def links_named(text: str) -> tuple[str, str]:
    """Split ``INTRA+INTER``, such as ``nvlink2+edr-x2``, into the names of two known links.

    Raises:
        RecipeError: a link is unknown.
    """
    intra, plus, inter = text.partition("+")
    for name, table, where in ((intra, INTRA, "inside a node"), (inter, INTER, "between nodes")):
        if not plus or name not in table:
            raise RecipeError(
                f"--links: {text!r} has no known link {where}{did_you_mean(name, list(table))}; "
                f"valid: INTRA+INTER with INTRA from {', '.join(INTRA)} and INTER from "
                f"{', '.join(INTER)}"
            )
    return intra, inter
