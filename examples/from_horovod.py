"""The five steps of a Horovod script with torch.distributed and largebatch, started by torchrun.

Trains a small ResNet on 1,438 of scikit-learn's digits in batches of 128 on any number of processes
that divides 128, with more than 95 % accuracy on the other 359 in well under a minute:

    torchrun --nproc-per-node 2 examples/from_horovod.py
"""

import os

import timm
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from largebatch.comm import Plan, PlanState, plan_hook, rendezvous
from largebatch.lars import LARS, as_scheduler, polynomial, split_parameters

# 1. init, and 2. device, which NCCL has to know
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
if gpu:
    torch.cuda.set_device(gpu)
ranks = {"rank": rank, "world_size": world_size, "store": rendezvous()}
dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu, **ranks)
device = gpu or torch.device("cpu")

torch.manual_seed(0)  # so that all ranks split the digits alike
data = load_digits()  # 8 x 8 pixels in [0, 16]
images = interpolate(torch.tensor(data.images).float()[:, None] / 8 - 1, scale_factor=2)
training, held_out = random_split(TensorDataset(images, torch.tensor(data.target)), [0.8, 0.2])
sampler = DistributedSampler(training)
loader = DataLoader(training, 128 // world_size, sampler=sampler, drop_last=True)
model = timm.create_model("test_resnet", in_chans=1, num_classes=10).to(device)

# 3. optimizer, and 4. broadcast
state = PlanState(Plan.single("hierarchical"))
ddp = DistributedDataParallel(model, **state.plan.ddp_options())  # broadcasts from rank 0
ddp.register_comm_hook(state, plan_hook)
optimizer = LARS(split_parameters(model, weight_decay=1e-4), lr=2.0)

epochs, steps = 8, 8 * len(loader)
scheduler = as_scheduler(optimizer, polynomial(2.0, steps, warmup_steps=steps // 5))
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = cross_entropy(ddp(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

# 5. checkpoint on rank 0
if rank == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "digits.pt")
    images, labels = held_out[:]
    with torch.no_grad():
        outputs = model.eval()(images.to(device)).cpu()
    print(f"nodes {state.topology.nodes} by {state.topology.source}")
    print(f"accuracy {(outputs.argmax(1) == labels).float().mean():.1%}")
dist.destroy_process_group()
