"""Write a model as ONNX, and compare the file in ONNX Runtime with torch."""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from ..errors import RecipeError
from .source import one_line, random_images

#: Largest difference, relative to the largest output, that is rounding (1e-6) and no wrong layer.
_TOLERANCE = 1e-3


def check_packages() -> None:
    """Check that the packages of ``largebatch[onnx]`` are installed."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise RecipeError(
                f"--to: onnx needs {name}, which is not installed; valid: pip install "
                "'largebatch[onnx]'"
            )


def write_onnx(model: nn.Module, size: int, path: Path) -> str:
    """Write a model, FP32 on the CPU, with an open batch size; returns how well outputs agree."""
    import onnxruntime

    images = random_images(3, size)  # other than the example, as the batch size is open
    disabled, doing = logging.root.manager.disable, "onnx cannot hold the model"
    try:
        # What the exporter logs and prints is about its own code.
        logging.disable(logging.WARNING)
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            torch.onnx.export(
                model,
                (random_images(2, size),),
                path,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                external_data=False,
                dynamo=True,
                verbose=False,
            )
        doing = "ONNX Runtime does not run what was written"
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        [found] = session.run(["logits"], {"images": images.numpy()})
    except OSError:
        raise
    except Exception as error:  # torch, onnxscript and ONNX Runtime raise errors of their own
        root: BaseException = error  # which explains itself, unlike the exporter's
        while root.__cause__ is not None:
            root = root.__cause__
        raise RecipeError(f"--to: {doing}: {one_line(root)[:300]}; valid: safetensors") from error
    finally:
        logging.disable(disabled)
    with torch.no_grad():
        expected = model(images)
    difference, largest = (torch.from_numpy(found) - expected).abs().max(), expected.abs().max()
    told = f"by at most {difference:.1g} for 3 random images, the largest being {largest:.2g}"
    if not difference <= _TOLERANCE * largest:
        raise RecipeError(f"--to: outputs in ONNX Runtime differ {told}; valid: safetensors")
    return f"outputs in ONNX Runtime {onnxruntime.__version__} differ from torch's {told}"
