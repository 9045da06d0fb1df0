"""Claim: the pixels of evaluation agree with torchvision's within one or two of 255 levels.

    python -m benchmarks.pipeline.pixels --sample imagenet-sample.tar

Decodes, resizes and crops the 200 real ImageNet photographs of the sample for evaluation (256, 224)
and for training (with the same random crops) and compares levels of 0 to 255, before
normalisation, with Pillow and torchvision. For comparison: DALI pipelines that look correct but are
not, as found in practice (DALI issues 1507, 1567, 2966, 2559).
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from largebatch.pipeline import ImageFolder, Loader, Transform
from largebatch.recipes.training.summary import processor, versions

RESULTS = Path(__file__).parents[1] / "results"
# With these, normalisation gives levels of 0 to 255.
LEVELS: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}


def ours(root: Path, backend: str, training: bool) -> torch.Tensor:
    """Return the levels of all images, FP32, ``[n, 3, 224, 224]``."""
    source = ImageFolder(root, "train")
    loader = Loader(
        source,
        Transform(**LEVELS),
        batch_size=len(source) if training else 50,
        epochs=1,
        training=training,
        backend=backend,
    )
    return torch.cat([batch.images for batch in loader])


def plain_dali(root: Path, **resize: Any) -> torch.Tensor:
    """Return the levels of a short DALI evaluation pipeline, FP32, ``[n, 3, 224, 224]``."""
    from nvidia.dali import fn, pipeline_def, types

    source = ImageFolder(root, "train")
    files = [source.name(i) for i in range(len(source))]

    @pipeline_def(batch_size=len(files), num_threads=2, device_id=None, exec_dynamic=True)
    def pipeline() -> Any:
        encoded, _ = fn.readers.file(files=files)
        image = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        image = fn.resize(image, **resize)
        return fn.crop_mirror_normalize(
            image, crop=(224, 224), dtype=types.FLOAT, output_layout="CHW"
        )

    built = pipeline()
    built.build()
    return torch.from_dlpack(built.run()[0].as_tensor())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=Path, required=True, help="tar of ImageNet's JPEG files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    from nvidia.dali import types

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with tarfile.open(options.sample) as archive:
            archive.extractall(root / "train" / "all", filter="data")
        evaluation, training = (ours(root, "torchvision", training) for training in (False, True))
        linear, shorter = types.INTERP_LINEAR, {"resize_shorter": 256.0}
        compared = {
            "evaluation: ours, nvImageCodec": (ours(root, "nvimgcodec", False), evaluation),
            "evaluation: ours, DALI": (ours(root, "dali-cpu", False), evaluation),
            "evaluation: DALI, `antialias=False`": (
                plain_dali(root, interp_type=linear, antialias=False, **shorter),
                evaluation,
            ),
            "evaluation: DALI, `INTERP_TRIANGULAR`": (
                plain_dali(root, interp_type=types.INTERP_TRIANGULAR, **shorter),
                evaluation,
            ),
            "evaluation: DALI, both sides to 256": (
                plain_dali(root, interp_type=linear, size=(256, 256)),
                evaluation,
            ),
            "training: ours, nvImageCodec": (ours(root, "nvimgcodec", True), training),
            "training: ours, DALI": (ours(root, "dali-cpu", True), training),
        }
    lines = [
        "| pixels | mean difference | 99 % of pixels within | largest of an image's mean |",
        "|---|---:|---:|---:|",
    ]
    for name, (found, reference) in compared.items():
        difference = (found - reference).abs().numpy()
        of_images = difference.reshape(len(difference), -1).mean(1)
        lines.append(
            f"| {name} | {difference.mean():.3f} | {np.quantile(difference, 0.99):.2f} "
            f"| {of_images.max():.2f} |"
        )
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines += ["", f"{date.today().isoformat()}, {processor()}, {packages}"]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pixels.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
