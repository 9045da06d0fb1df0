"""LARS and a plan in a loop like imagenet/main.py of pytorch/examples, started by mp.spawn.

Trains a small ResNet on 1,438 of scikit-learn's digits in batches of 128, one process for each GPU
or two on a CPU, with more than 95 % accuracy on the other 359 in well under a minute:

    python examples/ddp_spawn.py
"""

import sys

import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from largebatch.comm import Plan, PlanState, plan_hook
from largebatch.lars import LARS, as_scheduler, polynomial, split_parameters

GPUS = torch.cuda.device_count()


def digits():
    data = load_digits()  # 8 x 8 pixels in [0, 16]
    images = interpolate(torch.tensor(data.images).float()[:, None] / 8 - 1, scale_factor=2)
    generator = torch.Generator().manual_seed(0)
    return random_split(TensorDataset(images, torch.tensor(data.target)), [0.8, 0.2], generator)


def main_worker(rank: int, world_size: int, url: str, state: PlanState, epochs: int = 8) -> None:
    gpu = torch.device("cuda", rank) if GPUS else None
    if gpu:
        torch.cuda.set_device(gpu)
    device, back_end = gpu or torch.device("cpu"), "nccl" if gpu else "gloo"
    dist.init_process_group(back_end, url, rank=rank, world_size=world_size, device_id=gpu)
    state.connect()  # without torchrun, nodes are found by the names of the hosts
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10).to(device)
    ddp = DistributedDataParallel(model, [gpu] if gpu else None, **state.plan.ddp_options())
    ddp.register_comm_hook(state, plan_hook)
    sampler = DistributedSampler(digits()[0])
    loader = DataLoader(sampler.dataset, 128 // world_size, sampler=sampler, drop_last=True)
    optimizer = LARS(split_parameters(model, weight_decay=1e-4), lr=2.0)
    steps = epochs * len(loader)
    scheduler = as_scheduler(optimizer, polynomial(2.0, steps, warmup_steps=steps // 5))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(ddp(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    if rank == 0:
        images, labels = digits()[1][:]
        with torch.no_grad():
            outputs = model.eval()(images.to(device)).cpu()
        print(f"nodes {state.topology.nodes} by {state.topology.source}")
        print(f"accuracy {(outputs.argmax(1) == labels).float().mean():.1%}")
    dist.destroy_process_group()


def main(url: str = "tcp://localhost:23456") -> None:
    processes, state = GPUS or 2, PlanState(Plan.single("hierarchical"))
    mp.spawn(main_worker, (processes, url, state), processes)


if __name__ == "__main__":
    main(*sys.argv[1:])
