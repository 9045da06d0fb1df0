"""Names that recipes are checked against, in a module that does not load torch."""

#: The precisions; ``PRECISIONS`` has them by these names.
PRECISION_NAMES = ("fp32", "bf16", "fp16", "bf16-master", "fp16-master", "fp16-pure")

#: Precisions by the optimization levels of apex.amp, which apex has removed. In apex, O3 also put
#: norm layers in FP16 unless ``keep_batchnorm_fp32=True`` was set, as it was for speed; here they
#: stay in FP32.
OPT_LEVELS: dict[str, str] = {
    "O0": "fp32",
    "O1": "fp16",
    "O2": "fp16-master",
    "O3": "fp16-pure",
}

#: The ways to choose a loss scale, besides a number.
LOSS_SCALES = ("auto", "dynamic", "none")
