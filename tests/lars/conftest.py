"""Where there is no GPU, Triton's kernels run in its interpreter; it must be told before import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
