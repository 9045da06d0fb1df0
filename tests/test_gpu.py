"""What needs a CUDA GPU: the paths that the CPU's tests cannot take."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import Plan, Topology, register
from largebatch.lars import LARS
from largebatch.lars.reference import DIALECTS
from largebatch.pipeline import ImageFolder, Loader, Transform
from largebatch.recipes.job import Job
from largebatch.recipes.load import load
from largebatch.recipes.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 8))


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("implementation", ["foreach", "triton"])
def test_lars_on_the_gpu_is_the_reference_without_a_host_sync(dialect, implementation):
    models = [network().cuda(), network().cuda()]
    optimizers = [
        LARS(m.parameters(), 0.5, weight_decay=1e-3, dialect=dialect, implementation=i)
        for m, i in zip(models, ("reference", implementation), strict=True)
    ]
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    x = torch.randn(32, 64, device="cuda")
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            scaler.scale(model(x).square().mean()).backward()
            if step == 3:
                next(model.parameters()).grad[0, 0] = float("inf")
                before = copy.deepcopy([p.detach() for p in model.parameters()])
            torch.cuda.set_sync_debug_mode("error")
            try:
                scaler.step(optimizer)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            optimizer.zero_grad()
            if step == 3:
                for old, new in zip(before, model.parameters(), strict=True):
                    assert torch.equal(old, new)
        scaler.update()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["foreach", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_on_the_gpu_are_rounded_into_half_precision(implementation, dtype):
    models = [network().cuda().to(dtype) for _ in range(2)]
    optimizers = [
        LARS(m.parameters(), 0.5, master_weights=True, implementation=i)
        for m, i in zip(models, ("reference", implementation), strict=True)
    ]
    for _ in range(5):
        x = torch.randn(32, 64, device="cuda", dtype=dtype)
        models[0](x).square().mean().backward()
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            ours.grad = theirs.grad.clone()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            for parameter in model.parameters():
                master = optimizer.state[parameter]["master"]
                assert torch.equal(parameter, master.to(dtype))
            optimizer.zero_grad()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        a, b = optimizers[1].state[ours]["master"], optimizers[0].state[theirs]["master"]
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_captured_cuda_graph_takes_a_new_learning_rate():
    models = [network().cuda(), network().cuda()]
    rate = torch.tensor(0.5, device="cuda")
    captured, plain = (LARS(m.parameters(), r) for m, r in zip(models, (rate, 0.5), strict=True))
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # makes the state, and the table of addresses
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    plain.step()
    for lr in (0.5, 0.1):
        rate.fill_(lr)
        plain.param_groups[0]["lr"] = lr
        graph.replay()
        plain.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_dali_on_the_gpu_makes_the_images_of_the_cpu(photos):
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    source, transform = ImageFolder(photos, "train"), Transform(image_size=24, eval_resize=28)
    options = {"batch_size": 12, "epochs": 2}
    on_cpu = Loader(source, transform, backend="dali-cpu", **options)
    on_gpu = Loader(source, transform, device="cuda", **options)
    assert on_gpu.backend == "dali-gpu"
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours.images.is_cuda
        assert torch.equal(ours.labels.cpu(), theirs.labels)
        levels = 255 * 0.226 * (ours.images.cpu() - theirs.images).abs()
        assert levels.mean() < 1.5


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
@pytest.mark.parametrize("wire_dtype", [None, "fp16"])
def test_the_hook_on_nccl_gives_the_gradients_of_plain_ddp(tmp_path, algorithm, wire_dtype):
    """One rank: the stream and the future are those of many, and there is nothing to sum."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plan = Plan.single(algorithm, wire_dtype=wire_dtype, fusion_threshold_bytes=20_000)
        plain, hooked = (DistributedDataParallel(network().cuda()) for _ in range(2))
        register(hooked, plan, Topology.from_environment())
        for _ in range(3):
            x = torch.randn(32, 64, device="cuda")
            for model in (plain, hooked):
                model.zero_grad()
                model(x).square().mean().backward()
            for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
                torch.testing.assert_close(
                    a.grad, b.grad, rtol=2e-3 if wire_dtype else 0, atol=1e-5
                )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_trainer_learns_the_digits(digits, tmp_path, precision):
    overrides = [
        f"data.path={digits}",
        f"run_dir={tmp_path}",
        f"precision={precision}",
        "epochs=8",
        "schedule.warmup=2ep",
    ]
    trainer = Trainer(load("digits", overrides), Job(0, 1, 1, torch.device("cuda", 0)))
    assert trainer.run()["top1"] >= 95
