"""LARS and a plan under FSDP2 on four CPU processes, two of which share each copy of the model.

Each rank stores and updates a shard of every tensor. The trust ratio needs the norm of the whole
tensor, so LARS sums squared norms over the shards with one small all-reduce per parameter group.
FSDP2 averages gradients within a copy, the plan between copies. On a cluster, the ranks of a node
share a copy. Reaches more than 95 % accuracy on held-out digits.

    torchrun --nproc-per-node 4 examples/with_fsdp2.py
"""

import timm
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, interpolate

from largebatch.comm import Plan, register_fsdp2
from largebatch.lars import LARS, as_scheduler, polynomial, split_parameters


def main(epochs: int = 8, ranks_per_copy: int = 2) -> float:
    """Train, and return the accuracy on held-out digits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights, and the same order of images, on every rank
    data = load_digits()  # 8 x 8 pixels in [0, 16]
    images = interpolate(torch.tensor(data.images).float()[:, None] / 8 - 1, scale_factor=2)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels))
    training, held_out = order[:1408], order[1408:]

    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    shape = ranks // ranks_per_copy, ranks_per_copy
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("between", "within"))["within"]
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        fully_shard(stage, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp2(model, Plan.single("hierarchical"))
    optimizer = LARS(split_parameters(model, weight_decay=1e-4), lr=2.0)
    steps = epochs * len(training) // 128
    scheduler = as_scheduler(optimizer, polynomial(2.0, steps, warmup_steps=steps // 5))

    for _ in range(epochs):
        for batch in training[torch.randperm(len(training))].split(128):
            own = batch[rank::ranks]
            loss = cross_entropy(model(images[own]), labels[own])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        correct = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean()
    if rank == 0:
        print(f"accuracy {correct:.1%}")
    return correct.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
