"""Published scaling efficiencies with the inputs of their prediction, in two sets.

:data:`SPLIT` says which points may set constants of the model, and why. It was written before
anything was fitted. Tags of sources: [S] read in the source, [C] computed from such figures, [M]
recalled and not verified, [assumed] none of these.

An efficiency is the throughput of a GPU in ``run`` relative to that of a GPU in ``base``, which is
one GPU with the same images unless the source compares with something else.
"""

from __future__ import annotations

from dataclasses import dataclass

SPLIT = (
    "Points on up to 64 GPUs may set constants, and those on more may not: a user has measured a "
    "small cluster and asks about a larger one. Nothing of Jia et al. may set constants, since it "
    "is what the model is to predict. Larger points may where no published run on up to 64 GPUs "
    "has a batch small enough for the time per step that does not shrink with the images: 1,024 "
    "A100 with 35 images each, and 512 V100 with 65."
)

#: Runs of MLPerf that set the t0 of a GPU, with their base; the mean where there are two.
LINES = {"h100": ("3.1, H100",), "a100": ("2.0, A100",), "v100": ("0.6, V100", "0.7, V100")}


@dataclass(frozen=True)
class System:
    """A kind of cluster."""

    gpu: str  # name of the preset that has the GPU's time per step
    per_node: int  # number of GPUs on each node
    links: tuple[str, str]  # names of the presets of links inside and between nodes
    source: str  # where these are from, with tags


@dataclass(frozen=True)
class Run:
    """A training run, as far as its speed depends on it.

    ``rate`` is in images per second of one GPU, at ``rate_images`` images per GPU and step.
    """

    gpus: int
    images: float
    rate: float
    rate_images: float | None = None


@dataclass(frozen=True)
class Point:
    """A published scaling efficiency."""

    name: str  # who, and on what
    published: float  # throughput per GPU relative to ``base``
    source: str  # where that is from, with its tag
    model: str  # a key of ``benchmarks.comm.published.MODELS``.
    half: bool  # whether gradients are sent in 16 bits
    system: System  # the cluster
    run: Run  # the run to be predicted
    base: Run  # what it is relative to
    sets: bool  # whether it may set constants
    inputs: tuple[str, ...] = ()  # sources of the other inputs, with tags
    algorithm: str = "nccl"  # ``nccl``, or an algorithm of ``ALGORITHMS``, or ``paper``
    shape: tuple[int, int] | None = None  # of a torus
    fused_bytes: int | None = 25 * 2**20  # fusion threshold; None leaves it to the model
    overlap: bool = True  # whether gradients are reduced during backward


DGX1_P100 = System("p100", 8, ("nvlink1", "edr-x4"), "DGX-1 with 8 P100 [S]; NVLink [assumed]")
DGX1 = System("v100", 8, ("nvlink2", "edr-x4"), "DGX-1 with 8 V100 [S]; NVLink [assumed]")
DGX2 = System("v100", 16, ("nvlink2", "edr-x8"), "DGX-2 with 16 V100 [S]; NVLink, 8 EDR [assumed]")
DGX_A100 = System("a100", 8, ("nvlink3", "hdr-x8"), "DGX A100, NVLink, 8 HDR [S]")
DGX_H100 = System("h100", 8, ("nvlink4", "ndr-x8"), "DGX H100 [S]; NVLink, 8 NDR [assumed]")
XE8545 = System("a100", 4, ("nvlink3", "hdr-x2"), "Dell XE8545: 4 A100 of 40 GB, 2 HDR [S]")
ONEFLOW = System("v100", 8, ("nvlink2", "edr"), "8 V100 per node, NVLink, one EDR [S]")
BIG_BASIN = System("p100", 8, ("nvlink1", "eth50"), "8 P100 per node, 50 Gbit/s [S]; NVLink [M]")
MN1 = System("p100", 8, ("pcie3", "fdr-x2"), "2 FDR per node [S]; 8 P100 per node, PCIe [M]")
UBER = System("p100", 4, ("pcie3", "eth25"), "4 Pascal GPUs per node, 25 Gbit/s RoCE [S]; P100 [M]")
TENCENT = System("p40", 8, ("pcie3", "roce100"), "8 P40 per node, 100 Gbit/s RoCE [S]; PCIe [M]")
ABCI = System("v100", 4, ("nvlink2", "edr-x2"), "two EDR per node [S]; 4 V100 per node [M]")
SUMMIT = System("v100", 6, ("nvlink2", "edr-x2"), "6 V100 per node [M]; two EDR [assumed]")

_NVIDIA = "NVIDIA/DeepLearningExamples [S]"
_ONEFLOW = "OneFlow's DLPerf, 2020: medians of 5 to 7 runs [S]"


def _examples(
    name: str,
    system: System,
    images: int,
    half: bool,
    one: float,
    many: dict[int, float],
    source: str = _NVIDIA,
) -> list[Point]:
    """Points of a table of images per second on 1 and more GPUs; all of them may set constants."""
    return [
        Point(
            f"{name}, {gpus} × {images}",
            rate / gpus / one,
            source,
            "ResNet-50",
            half,
            system,
            Run(gpus, images, one),
            Run(1, images, one),
            True,
            (f"{one:g} images/s on one GPU [S]",),
        )
        for gpus, rate in many.items()
    ]


# FP32 and TF32 reduce FP32; the AMP of PyTorch and TensorFlow does so too, MXNet's reduces FP16.
_TABLES = (
    _examples("PyTorch, A100 80 GB, AMP", DGX_A100, 256, False, 2470, {8: 16621}),
    _examples("PyTorch, A100 80 GB, TF32", DGX_A100, 256, False, 938, {8: 7248}),
    _examples("PyTorch, V100 16 GB, AMP", DGX1, 256, False, 1200, {8: 8322}),
    _examples("PyTorch, V100 16 GB, FP32", DGX1, 128, False, 367, {8: 2855}),
    _examples("PyTorch, V100 32 GB, AMP", DGX1, 256, False, 1156, {8: 8056}),
    _examples("PyTorch, V100 32 GB, FP32", DGX1, 128, False, 356, {8: 2766}),
    _examples("MXNet 22.10, A100, AMP", DGX_A100, 512, True, 3410, {8: 26674}),
    _examples("MXNet 22.10, A100, TF32", DGX_A100, 256, False, 1056, {8: 8247}),
    _examples("MXNet 20.12, A100, AMP", DGX_A100, 256, True, 2180, {8: 16925}),
    _examples("MXNet 20.12, A100, TF32", DGX_A100, 256, False, 1022, {8: 8001}),
    _examples("MXNet 20.12, V100 16 GB, AMP", DGX1, 192, True, 1376, {8: 10723}),
    _examples("MXNet 20.12, V100 16 GB, FP32", DGX1, 96, False, 384, {8: 3005}),
    _examples("MXNet 20.12, DGX-2, AMP", DGX2, 256, True, 1492, {8: 11368, 16: 21484}),
    _examples("MXNet 20.12, DGX-2, FP32", DGX2, 128, False, 417, {8: 3223, 16: 6338}),
    _examples("Paddle, A100, AMP", DGX_A100, 256, True, 2897, {8: 23874}),
    _examples("Paddle, A100, TF32", DGX_A100, 256, False, 1024, {8: 8013}),
    _examples("TensorFlow + XLA, A100 40 GB, AMP", DGX_A100, 256, False, 2375, {8: 17400}),
    _examples("TensorFlow + XLA, A100 40 GB, TF32", DGX_A100, 256, False, 909, {8: 7000}),
    _examples("TensorFlow + XLA, V100 16 GB, AMP", DGX1, 256, False, 1270, {8: 9510}),
    _examples("TensorFlow + XLA, V100 16 GB, FP32", DGX1, 128, False, 412, {8: 3170}),
    *(
        _examples(f"DLPerf {name}", ONEFLOW, images, False, one, many, _ONEFLOW)
        for name, images, one, many in (
            ("OneFlow, FP32", 128, 384.85, {8: 2969.45, 16: 5906.55, 32: 11711.18}),
            ("TensorFlow 1, FP32", 128, 362.44, {8: 2721.98, 16: 5099.42, 32: 9514.64}),
            ("MXNet, FP32", 96, 389.71, {8: 2947.72, 16: 5684.68, 32: 10419.21}),
            ("PyTorch, FP32", 128, 354.40, {8: 2719.07, 16: 5307.21, 32: 10632.33}),
            ("Paddle, FP32", 128, 352.72, {8: 2625.38, 16: 4895.27, 32: 9348.17}),
            ("TensorFlow 2, FP32", 128, 321.80, {8: 2458.74, 16: 4849.68, 32: 9418.44}),
            ("NVIDIA's PyTorch, FP32", 128, 367.29, {8: 2887.65, 16: 5716.79, 32: 10917.09}),
            ("NVIDIA's PyTorch, AMP", 256, 802.9, {8: 6154.66, 16: 11991.94, 32: 22551.16}),
        )
    ),
)

_TF = "tensorflow.org's benchmarks of 2017, synthetic images, replicated with NCCL [S]"


def _replicated(model: str, images: int, one: float, eight: float) -> Point:
    base = Run(1, images, one)
    run = Run(8, images, one)
    name = f"TensorFlow 1.1, {model}, 8 P100 × {images}"
    rate = (f"{one:g} images/s on one GPU [S]",)
    return Point(name, eight / 8 / one, _TF, model, False, DGX1_P100, run, base, True, rate)


_MLPERF = "MLPerf's log: rate of training, without evaluation [S]"


def _mlperf(name: str, system: System, gpus: int, images: int, rate: float, base: Run) -> Point:
    run = Run(gpus, images, base.rate, base.images)
    return Point(
        f"MLPerf {name}, {gpus:,} × {images}",
        rate / gpus / base.rate,
        f"{_MLPERF}, {rate:,.0f} images/s",
        "ResNet-50",
        True,
        system,
        run,
        base,
        gpus <= 64 or any(name in names for names in LINES.values()),
        (f"base: {base.gpus} × {base.images:g}, {base.rate:,.0f} images/s per GPU [S]",),
    )


_MLPERF_POINTS = (
    _mlperf("3.1, H100", DGX_H100, 64, 50, 318_148, Run(8, 400, 56_431 / 8)),
    _mlperf("3.0, H100", DGX_H100, 512, 40, 2_249_638, Run(8, 400, 56_074 / 8)),
    _mlperf("3.0, H100", DGX_H100, 3584, 16, 10_103_304, Run(8, 400, 56_074 / 8)),
    _mlperf("2.0, A100 (Dell)", XE8545, 64, 204, 176_476, Run(4, 256, 12_127 / 4)),
    _mlperf("2.0, A100 (Dell)", XE8545, 128, 128, 313_615, Run(4, 256, 12_127 / 4)),
    _mlperf("2.0, A100", DGX_A100, 1024, 35, 2_361_913, Run(8, 408, 27_190 / 8)),
    # Its log has no usable rate: epochs over minutes, less evaluation.
    _mlperf("2.0, A100, whole run", DGX_A100, 4216, 16, 6_033_313, Run(8, 408, 27_190 / 8)),
    _mlperf("0.7, A100", DGX_A100, 768, 45, 1_251_578, Run(8, 408, 22_511 / 8)),
    _mlperf("0.7, V100", DGX2, 512, 65, 627_461, Run(16, 208, 25_286 / 16)),
    _mlperf("0.6, V100", DGX2, 512, 65, 633_773, Run(16, 208, 24_660 / 16)),
)


def _paper(
    name: str, published: float, source: str, gpus: int, images: int, model: str, rate: float
) -> Point:
    inputs = [
        f"{rate:g} images/s per P40: "
        + ("[M]" if model == "ResNet-50" else "the whole training in 4 min on 1,024 [C, M]"),
        "gradients in FP16 [S]",
        "their algorithms: flat ring, or reduce, ring among masters, broadcast, by size [S]",
    ]
    return Point(
        f"Jia et al., {name}, {gpus:,} P40 × {images}",
        published,
        source,
        model,
        True,
        TENCENT,
        Run(gpus, images, rate),
        Run(1, images, rate),
        False,
        tuple(inputs),
        algorithm="paper",
        fused_bytes=None,
    )


_ARTICLE, _FIGURE = "the team's article: ~99 and 97 % [S]", "figures of the paper [M]"
_JIA = (
    _paper("ResNet-50", 0.99, _ARTICLE, 1024, 64, "ResNet-50", 218),
    _paper("ResNet-50, images assumed", 0.97, _ARTICLE, 2048, 64, "ResNet-50", 218),
    _paper("ResNet-50", 0.879, "Sony's table, quoted by NVIDIA [S]", 2048, 32, "ResNet-50", 218),
    _paper("AlexNet-BN", 0.914, _FIGURE, 512, 128, "AlexNet-BN", 495),
    _paper("AlexNet-BN", 0.804, _FIGURE, 1024, 64, "AlexNet-BN", 495),
)


def _horovod(model: str, gpus: int, published: float, rate: float, source: str) -> Point:
    return Point(
        f"Horovod, {model}, {gpus} P100 × 64",
        published,
        "Horovod's benchmarks [S]",
        model,
        False,
        UBER,
        Run(gpus, 64, rate),
        Run(1, 64, rate),
        False,
        (f"{rate:g} images/s on one P100: {source}", "64 images, FP32, fusion of 64 MB [S]"),
        fused_bytes=64 * 2**20,
    )


_R101 = (1656.82 / 16, "Horovod's 16 Pascal GPUs [C]")
_TF_P100 = "tensorflow.org's DGX-1 [S]"
_OTHERS = (
    Point(
        "Goyal et al., ResNet-50, 256 P100 × 32",
        0.90,
        "abstract: ~90 %, from 8 GPUs [S]",
        "ResNet-50",
        False,
        BIG_BASIN,
        Run(256, 32, 138),
        Run(8, 32, 138),
        False,
        ("138 images/s per P100: He et al., 8 P100 for 29 h [C]", "halving-doubling [M]"),
        algorithm="halving-doubling",
        fused_bytes=None,
    ),
    Point(
        "Akiba et al., ResNet-50, 1,024 P100 × 32",
        0.80,
        "notes on the paper: 80 % [S]",
        "ResNet-50",
        True,
        MN1,
        Run(1024, 32, 195),
        Run(1, 32, 195),
        False,
        (
            f"195 images/s per P100 at 32 images: {_TF_P100}",
            "FP16 communication [S]; after backward, in one piece: ChainerMN [M]",
        ),
        fused_bytes=2**40,
        overlap=False,
    ),
    *(_horovod("ResNet-101", gpus, 0.90, *_R101) for gpus in (128, 512)),
    *(_horovod("Inception V3", gpus, 0.90, 142, _TF_P100) for gpus in (128, 512)),
    _horovod("VGG-16", 128, 0.79, 154, _TF_P100),
    _horovod("VGG-16", 512, 0.68, 154, _TF_P100),
    Point(
        "Sony, ResNet-50, 1,088 V100 × 32",
        0.9162,
        "Sony's abstract: 91.62 % [S]",
        "ResNet-50",
        True,
        ABCI,
        Run(1088, 32, 1376),
        Run(1, 32, 1376),
        False,
        (
            "1,376 images/s per V100: MXNet 20.12 at 192 images [S], at 32 [assumed]",
            "gradients in FP16, a torus of 32 × 34 [M]",
        ),
        algorithm="torus",
        shape=(32, 34),
        fused_bytes=None,
    ),
    Point(
        "Kurth et al., DeepLabv3+, 27,360 V100 × 1",
        0.907,
        "90.7 %, FP32 [S]",
        "DeepLabv3+",
        False,
        SUMMIT,
        Run(27360, 1, 325.8e3 / 27360 / 0.907 / 14.41),
        Run(1, 1, 325.8e3 / 27360 / 0.907 / 14.41),
        False,
        (
            "an image is 14.41 TFLOP [M], at 325.8 PF/s / 27,360 / 0.907 per GPU [C]",
            "torchvision's deeplabv3_resnet50 for the gradients [assumed]; hierarchical [M]",
        ),
        algorithm="hierarchical",
        fused_bytes=None,
    ),
)

POINTS: tuple[Point, ...] = (
    *(point for table in _TABLES for point in table),
    _replicated("AlexNet", 512, 2987, 17822),
    _replicated("VGG-16", 64, 154, 1081),
    *_MLPERF_POINTS,
    *_OTHERS,
    *_JIA,
)
