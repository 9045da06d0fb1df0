"""Presets of GPUs and links to simulate a step on, each with the source of its numbers.

``[S]``: read in the named source; ``[C]``: computed from such figures; ``[M]``: recalled from a
paper, not verified; ``assumed``: the line rate of the standard or vendor, which is not quite
reached in practice. Latencies are those of NCCL's own model for its Simple protocol (``hwLat`` in
src/graph/tuning.cc, about version 2.8): 3.4 us over NVLink, 5.7 us over PCIe, 9.6 us over the
network.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...comm import Level
from ..errors import RecipeError, did_you_mean

#: The model and image size for which the throughputs hold.
MODEL, IMAGE_SIZE = "resnet50", 224


@dataclass(frozen=True)
class Gpu:
    """A GPU model.

    Attributes:
        images_per_second: training throughput of one GPU on :data:`MODEL`.
        source: source of the throughput.
        links: names of the usual links inside and between nodes.
        between: smallest and largest throughput that may be expected instead, with any framework.
        between_source: source of these two.
        memory_gb: memory in 10^9 bytes, of the GPU with that throughput.
        per_node: usual number of GPUs per node.
    """

    images_per_second: float
    source: str
    links: tuple[str, str]
    between: tuple[float, float]
    between_source: str
    memory_gb: float
    per_node: int = 8


GPUS = {
    "p40": Gpu(
        218.0,
        "[M] Jia et al. 2018: mixed precision, 64 images at a time",
        ("pcie3", "roce100"),
        (142.0, 218.0),
        "[C] Jia et al. 2018: the whole run on 2,048 of them, 6.6 min; [M] as above",
        24.0,
    ),
    "p100": Gpu(
        138.0,
        "[C] He et al.: 90 epochs on 8 of them in 29 h [S], FP32",
        ("nvlink1", "fdr"),
        (110.0, 166.0),
        "assumed: 20 % less or more",
        16.0,
    ),
    "v100": Gpu(
        1200.0,
        "[S] NVIDIA DeepLearningExamples, PyTorch 21.03, V100 16 GB, AMP",
        ("nvlink2", "edr-x2"),
        (1156.0, 1492.0),
        "[S] the same examples: PyTorch, V100 32 GB; MXNet, DGX-2",
        16.0,
    ),
    "a100": Gpu(
        2470.0,
        "[S] NVIDIA DeepLearningExamples, PyTorch 21.03, A100 80 GB, AMP",
        ("nvlink3", "hdr-x8"),
        (2100.0, 3410.0),
        "[C] Composer's MLPerf 2.0 log, 8 GPUs; [S] DeepLearningExamples, MXNet 22.10",
        80.0,
    ),
    "h100": Gpu(
        7083.0,
        "[S] NVIDIA's MLPerf Training 3.1 log, MXNet, H100 SXM",
        ("nvlink4", "ndr-x8"),
        (4900.0, 7083.0),
        "[C] roofline of an eager step in PyTorch; [S] as above",
        80.0,
    ),
}


@dataclass(frozen=True)
class Link:
    """A link.

    Attributes:
        latency_us: alpha, in microseconds.
        gbit: gigabits per second, per GPU inside a node and per node between nodes.
        source: source of the rate.
    """

    latency_us: float
    gbit: float
    source: str

    @property
    def level(self) -> Level:
        """The link in the form that the cost model takes."""
        return Level.of(self.latency_us, self.gbit)


_NVLINK, _PCIE, _NETWORK = 3.4, 5.7, 9.6

#: Links inside a node, by name.
INTRA = {
    "pcie3": Link(_PCIE, 126.0, "assumed: 16 lanes of 8 GT/s"),
    "pcie4": Link(_PCIE, 252.0, "assumed: 16 lanes of 16 GT/s"),
    "nvlink1": Link(_NVLINK, 640.0, "assumed: P100, 4 links of 20 GB/s each way"),
    "nvlink2": Link(_NVLINK, 1200.0, "assumed: V100, 6 links of 25 GB/s each way"),
    "nvlink3": Link(_NVLINK, 2400.0, "assumed: A100, 12 links of 25 GB/s each way"),
    "nvlink4": Link(_NVLINK, 3600.0, "assumed: H100, 18 links of 25 GB/s each way"),
}

#: Links between nodes, by name.
INTER = {
    "eth10": Link(_NETWORK, 10.0, "assumed: 10 Gbit/s Ethernet"),
    "eth25": Link(_NETWORK, 25.0, "[S] Tencent's 128 V100 of 2020: 25 Gbit/s"),
    "roce100": Link(_NETWORK, 100.0, "[S] Jia et al. 2018: 100 Gbit/s RoCE v2"),
    "fdr": Link(_NETWORK, 54.5, "assumed: InfiniBand FDR, 4 lanes"),
    "edr": Link(_NETWORK, 100.0, "assumed: InfiniBand EDR"),
    "edr-x2": Link(_NETWORK, 200.0, "[S] two EDR per node, as in Sony's cluster of 2018"),
    "hdr-x8": Link(_NETWORK, 1600.0, "assumed: 8 InfiniBand HDR per node"),
    "ndr-x8": Link(_NETWORK, 3200.0, "assumed: 8 InfiniBand NDR per node"),
    "slingshot-x4": Link(_NETWORK, 800.0, "assumed: 4 Slingshot of 200 Gbit/s per node"),
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
