"""Weights that timm has published score what timm's own evaluation gives them."""

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models import get_pretrained_cfg

from largebatch.pipeline import ImageFolder
from largebatch.recipes.trained import pretrained
from largebatch.recipes.trained.pretrained import open_weights
from largebatch.recipes.trained.score import score
from tests.recipes.commands.test_app import run
from tests.recipes.hub import NAMES
from tests.recipes.runs import JOB


@torch.no_grad()
def by_timm(name, root):
    """Accuracy and loss by timm's model and its transform of images."""
    model = timm.create_model(name, pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model, use_test_size=True)
    transform = timm.data.create_transform(**config)
    source = ImageFolder(root, "val")
    paths = [source.name(index) for index in range(len(source))]
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    logits, labels = model(images), torch.from_numpy(source.labels)
    right = (logits.argmax(1) == labels).double().mean().item()
    return 100 * right, F.cross_entropy(logits, labels).item()


@pytest.mark.parametrize("name", NAMES)
def test_the_score_is_that_of_timms_model_and_transform(hub, photos, name):
    keys = [f"data.path={photos}", "data.backend=torchvision", "device=cpu"]

    def scored(*others):
        return score(open_weights(Path(f"timm:{name}"), [*keys, *others]), JOB)

    found, (top1, loss) = scored(), by_timm(name, photos)
    assert found.top1 == pytest.approx(top1)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    cubic = name == "test_vit.r160_in1k"
    other = f"data.eval_interpolation={'bilinear' if cubic else 'bicubic'}"
    assert scored(other).loss != pytest.approx(loss, rel=1e-5)


def test_images_and_classes_are_those_of_timms_tables():
    def images(name):
        return pretrained._images_of(get_pretrained_cfg(name).to_dict(), name)

    # A size and a crop for testing: 288 px, all of it. Without them: 299 px, 87.5 % of the side.
    resnet = images("resnet50.a1_in1k")
    assert (resnet["eval_size"], resnet["eval_resize"]) == (288, 288)
    assert resnet["eval_interpolation"] == "bicubic"
    inception = images("inception_v3.tv_in1k")
    assert (inception["eval_size"], inception["eval_resize"]) == (299, 341)
    assert inception["mean"] == [0.5, 0.5, 0.5]
    classes = pretrained._classes_of(get_pretrained_cfg("resnet50.a1_in1k").to_dict())
    assert (len(classes), classes[0], classes[-1]) == (1000, "n01440764", "n15075141")
    assert list(classes) == sorted(classes)


def test_evaluate_takes_a_name_without_its_tag_and_export_none(hub, photos, tmp_path):
    keys = [f"data.path={photos}", "device=cpu"]
    result = run("evaluate", "timm:test_vit", *keys)
    assert result.exit_code == 0, result.stderr
    first, second, *_ = result.output.splitlines()
    assert first == (
        f"timm:test_vit.r160_in1k: test_vit.r160_in1k of timm {timm.__version__}, fp32 on cpu"
    )
    assert second.startswith(f"23 images, {photos}/val, at 160 px of 168 (bicubic), decoded by ")
    result = run("export", "timm:test_resnet", "--to", "timm", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "RUN: no file or folder timm:test_resnet; valid: " in result.stderr
