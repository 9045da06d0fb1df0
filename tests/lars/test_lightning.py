"""A run in Lightning that unfreezes a layer is resumed bit for bit: weights and learning rates.

tests/recipes/training/test_resume.py resumes a loop in plain torch, with the same state dicts.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from largebatch.lars import LARS, as_scheduler, polynomial, split_parameters

HALF = 3  # steps of one epoch, and of half a schedule


@pytest.fixture
def _one_thread():
    """Use one thread, so that sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network():
    first = nn.Linear(6, 12, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def loader():
    images = torch.randn(HALF * 8, 6, generator=torch.Generator().manual_seed(0))
    labels = (images[:, 0] > 0).long() + (images[:, 1] > 1).long()
    return DataLoader(TensorDataset(images, labels), batch_size=8)


@pytest.mark.slow("imports Lightning")
@pytest.mark.usefixtures("_one_thread")
def test_layers_that_lightning_unfreezes_keep_a_tenth_of_the_rate(tmp_path):
    """Three epochs, with the first layer unfrozen in the second, whole and in two parts."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch >= 1:  # a resumed run must unfreeze the layer again
                self.unfreeze_and_add_param_group(module.net[0], optimizer)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.rates = network(), []

        def training_step(self, batch, index):
            images, labels = batch
            return cross_entropy(self.net(images), labels)

        def configure_optimizers(self):
            groups = split_parameters(self.net, weight_decay=1e-2)
            groups[1]["lr"] = 0.05  # of biases and norms
            optimizer = LARS(groups, lr=0.5, trust_coefficient=0.1, nesterov=True)
            optimizer.register_step_pre_hook(
                lambda optimizer, *_: self.rates.append([g["lr"] for g in optimizer.param_groups])
            )
            schedule = polynomial(0.5, 2 * HALF, warmup_steps=HALF + 1, start=0.1, end=0.01)
            scheduler = as_scheduler(optimizer, schedule)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def run(folder, epochs, resumes=False):
        module = Module()
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        options = {"accelerator": "cpu", "default_root_dir": folder, "callbacks": [Unfreeze()]}
        trainer = lightning.Trainer(max_epochs=epochs, **options, **quiet)
        saved = next((folder / "checkpoints").glob("*.ckpt")) if resumes else None
        trainer.fit(module, loader(), ckpt_path=saved)
        return module.net.state_dict(), module.rates

    torch.manual_seed(1)
    expected, rates = run(tmp_path / "whole", 3)
    assert [len(of_step) for of_step in rates] == [2] * HALF + [3] * 2 * HALF
    assert all(of_step[1] == pytest.approx(of_step[0] / 10) for of_step in rates)
    assert all(of_step[2] == pytest.approx(of_step[0] / 10) for of_step in rates[HALF:])
    for stops_after in (1, 2):
        torch.manual_seed(1)
        _, before = run(tmp_path / str(stops_after), stops_after)
        found, after = run(tmp_path / str(stops_after), 3, resumes=True)
        assert before + after == rates
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
