"""LARS under torchft: a process that dies is left out from the next step on, without a restart.

Trains a small network on 1,438 of scikit-learn's digits in batches of 128. It reaches
more than 95 % accuracy on the other 359. The batch is shared by the processes that are left:

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    for i in 1 2 3; do python examples/with_torchft.py & done
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torchft import Manager, Optimizer, ProcessGroupGloo

from largebatch.lars import LARS, polynomial, split_parameters


def main(steps: int = 176) -> tuple[float, nn.Module]:
    """Train; return the accuracy on held-out digits, and the network."""
    torch.manual_seed(0)
    data = load_digits()  # 8 x 8 pixels in [0, 16]
    order = torch.randperm(len(data.target))
    images = torch.tensor(data.images, dtype=torch.get_default_dtype())[order, None] / 8 - 1
    labels = torch.tensor(data.target)[order]
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 3, 2, padding=1), nn.GroupNorm(4, 64), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    lars = LARS(split_parameters(network, weight_decay=1e-4), lr=2.0)
    schedule = polynomial(2.0, steps, warmup_steps=steps // 5)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"rank": 0, "world_size": 1, "store_addr": "localhost", "store_port": store.port}
    # Not asynchronous: who takes part must be known before the batch is divided.
    manager = Manager(ProcessGroupGloo(), None, None, 1, use_async_quorum=False, **place)
    for part in (network, lars):  # what a process that joins receives
        manager.register_state_dict_fn(type(part).__name__, part.load_state_dict, part.state_dict)
    optimizer = Optimizer(manager, lars)
    while manager.current_step() < steps:
        optimizer.zero_grad()  # agrees on who takes part
        step, members = manager.current_step(), manager.num_participants()
        batch = torch.randperm(1438, generator=torch.Generator().manual_seed(step))[:128]
        mine = batch.tensor_split(members)[manager.participating_rank() or 0]
        lars.param_groups[0]["lr"] = lars.param_groups[1]["lr"] = schedule(step)
        loss = cross_entropy(network(images[mine]), labels[mine], reduction="sum") / len(batch)
        (loss * members).backward()
        for work in [manager.allreduce(weight.grad) for weight in network.parameters()]:
            work.wait()  # raises nothing if a process has died
        optimizer.step()  # only if all gradients have come
        print(f"step {step}: loss {loss.item() * members:.3f}, {members} processes", flush=True)
    manager.shutdown()
    accuracy = (network(images[1438:]).argmax(1) == labels[1438:]).float().mean().item()
    print(f"accuracy {accuracy:.1%}")
    return accuracy, network


if __name__ == "__main__":
    main()
