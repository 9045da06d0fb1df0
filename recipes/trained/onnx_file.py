"""Write a model as ONNX, and compare the file in ONNX Runtime with torch."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from ..errors import RecipeError
from .outputs import random_images

INPUT, OUTPUT = "images", "logits"
#: What torch's exporter and the comparison need: the packages of ``largebatch[onnx]``.
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
#: A file of ONNX is a Protocol Buffers message, of at most 2 GiB; larger weights are put beside it.
_LARGEST_FILE_BYTES = 1.9 * 2**30
#: The largest difference of outputs that different kernels may make, relative to the largest
#: output: rounding in FP32 is about 1e-6 after tens of layers, a wrong layer far above this.
_TOLERANCE = 1e-3


def check_packages() -> None:
    """Check that the packages of ``largebatch[onnx]`` are installed.

    Raises:
        RecipeError: One is not.
    """
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise RecipeError(
                f"--to: onnx needs {name}, which is not installed; valid: pip install "
                "'largebatch[onnx]'"
            )


def write_onnx(model: nn.Module, size: int, path: Path) -> str:
    """Write a model with an open batch size, and compare it with torch on random images.

    The input ``images`` is FP32 of shape ``[batch, 3, size, size]``, normalized; the output
    ``logits`` has shape ``[batch, classes]``.

    Args:
        model: The model, in FP32 on the CPU, for evaluation.
        size: Height and width of the images, in pixels.
        path: File to write.

    Returns:
        How well the outputs agree, in one line.

    Raises:
        RecipeError: ONNX cannot hold the model, ONNX Runtime does not run it, or the outputs
            differ.
    """
    import onnxruntime

    stored = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    batch = torch.export.Dim("batch", min=1)
    try:
        with _quietly():
            torch.onnx.export(
                model,
                (random_images(2, size),),
                path,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: batch},),
                external_data=stored > _LARGEST_FILE_BYTES,
                dynamo=True,
                verbose=False,
            )
    except OSError:
        raise
    except Exception as error:  # torch and onnxscript raise errors of their own
        raise RecipeError(
            f"--to: onnx cannot hold the model: {_reason(error)}; valid: safetensors"
        ) from error
    images = random_images(3, size)  # other than the example, as the batch size is open
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        [found] = session.run([OUTPUT], {INPUT: images.numpy()})
    except Exception as error:  # ONNX Runtime raises errors of its own
        raise RecipeError(
            f"--to: ONNX Runtime does not run what was written: {_reason(error)}; valid: "
            "safetensors"
        ) from error
    with torch.no_grad():
        expected = model(images)
    difference = (torch.from_numpy(found) - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not difference <= _TOLERANCE * largest:
        raise RecipeError(
            f"--to: the outputs of the ONNX file differ from the model's by {difference:.2g}, the "
            f"largest being {largest:.2g}; valid: safetensors"
        )
    return (
        f"checked: outputs in ONNX Runtime {onnxruntime.__version__} differ from torch's by at "
        f"most {difference:.1g} for 3 random images, the largest being {largest:.2g}"
    )


def _reason(error: BaseException) -> str:
    """The kind and first line of the error at the root of the exporter's, which explains itself."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"


@contextmanager
def _quietly() -> Iterator[None]:
    """Context manager without what the exporter logs and prints, which is about its own code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
