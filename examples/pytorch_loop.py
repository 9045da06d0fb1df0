"""LARS in a plain PyTorch loop: a timm model, parameter groups, warm-up, and FP16 on a GPU.

Trains a small ResNet on 1,438 of scikit-learn's digits in batches of 128. It reaches
more than 95 % accuracy on the other 359 in well under a minute on 2 CPU cores:

    python examples/pytorch_loop.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset, random_split

from largebatch.lars import LARS, as_scheduler, describe, polynomial, split_parameters


def main(epochs: int = 8) -> float:
    """Train, and return the accuracy on held-out digits."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = load_digits()  # 8 x 8 pixels in [0, 16]
    images = interpolate(torch.tensor(data.images).float()[:, None] / 8 - 1, scale_factor=2)
    training, held_out = random_split(TensorDataset(images, torch.tensor(data.target)), [0.8, 0.2])
    loader = DataLoader(training, batch_size=128, shuffle=True, drop_last=True)

    model = timm.create_model("test_resnet", in_chans=1, num_classes=10).to(device)
    groups = split_parameters(model, weight_decay=1e-4)  # biases and norms neither decay nor adapt
    print(describe(groups))
    optimizer = LARS(groups, lr=2.0)
    steps = epochs * len(loader)
    scheduler = as_scheduler(optimizer, polynomial(2.0, steps, warmup_steps=steps // 5))
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

    for epoch in range(epochs):
        for images, labels in loader:
            with torch.autocast(device, torch.float16, enabled=scaler.is_enabled()):
                loss = cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # LARS unscales; a step with an overflow changes nothing
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    images, labels = held_out[:]
    with torch.no_grad():
        accuracy = (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()
    print(f"accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
