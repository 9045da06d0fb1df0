"""Which kernels torch chooses for batch norm on a GPU, where a ResNet spends much of its time.

With BF16 images torch (2.11 and 2.15) takes its own kernels, with FP16 and FP32 ones cuDNN's. If a
test here fails, torch has changed its choice: measure bf16 against fp16 again.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA")

CUDNN, NATIVE = torch._C._BatchNormBackend.Cudnn, torch._C._BatchNormBackend.Native


def chosen(images, parameters, memory_format, training):
    """The kernels for images and parameters of these dtypes; nothing is computed."""
    with FakeTensorMode():
        batch = torch.empty(8, 64, 16, 16, dtype=images, device="cuda")
        batch = batch.to(memory_format=memory_format)
        vectors = [torch.empty(64, dtype=parameters, device="cuda") for _ in range(4)]
        return torch._C._select_batch_norm_backend(batch, *vectors, training, 1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("images", "kernels"),
    [(torch.float32, CUDNN), (torch.float16, CUDNN), (torch.bfloat16, NATIVE)],
)
def test_bf16_images_do_not_reach_the_kernels_of_cudnn(images, kernels, memory_format, training):
    # norm layers keep their parameters in FP32 in every precision but fp16-pure
    assert chosen(images, torch.float32, memory_format, training) == kernels


def test_half_precision_parameters_do_not_reach_the_kernels_of_cudnn():
    assert chosen(torch.float16, torch.float16, torch.channels_last, training=True) == NATIVE
