"""The loader: batches of every backend, for every rank, from any position of a run."""

import os
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.pipeline.damaged_images import InMemory
from benchmarks.pipeline.odd_images import encode
from largebatch.pipeline import DataError, ImageFolder, Loader, Synthetic
from largebatch.pipeline.decode.batch import prefetch
from tests.conftest import refused
from tests.pipeline.loaders import BACKENDS, LEVELS, SMALL, assert_same, loader, take


def test_a_translation_moves_the_image_and_fills_with_black(photos):
    whole = {"crop_area": (1.0, 1.0), "flip": 0.0}
    moves = replace(SMALL, **whole, translate=5)
    black = -torch.tensor(SMALL.mean) / torch.tensor(SMALL.std)
    for backend in BACKENDS:
        options = {"backend": backend, "epochs": 1}
        still = take(loader(photos, replace(SMALL, **whole), **options))[0]
        moved = take(loader(photos, moves, **options))[0]
        seen = set()
        for before, after in zip(still, moved, strict=True):
            padded = black[:, None, None].expand(3, 34, 34).clone()
            padded[:, 5:29, 5:29] = before
            windows = padded.unfold(1, 24, 1).unfold(2, 24, 1)  # [3, 11, 11, 24, 24]
            apart = (windows - after[:, None, None]).abs().amax((0, 3, 4))
            ((y, x),) = (apart < 1e-4).nonzero().tolist()
            seen.add((x, y))
        assert {x for x, _ in seen} == {y for _, y in seen} == set(range(11))
        assert len({x - y for x, y in seen}) > 11  # each direction has a number of its own


def test_alternating_flips_show_both_sides_of_each_image_in_two_epochs():
    pictures = np.random.default_rng(0).integers(0, 256, (53, 24, 24, 3), dtype=np.uint8)
    source = InMemory([encode(Image.fromarray(picture), "PNG") for picture in pictures])
    source.labels = np.arange(53)
    whole = {"crop_area": (1.0, 1.0), "crop_aspect": (1.0, 1.0), "flip": "alternating"}
    transform, flipped = replace(SMALL, **LEVELS | whole), [set() for _ in range(4)]
    options = {"batch_size": 53, "epochs": 4, "backend": "torchvision"}
    for epoch, (images, labels) in zip(flipped, Loader(source, transform, **options), strict=True):
        for image, label in zip(images, labels.tolist(), strict=True):
            shown = image.permute(1, 2, 0).round().byte().numpy()
            if not np.array_equal(shown, pictures[label]):
                assert np.array_equal(shown, pictures[label, :, ::-1])
                epoch.add(label)
    assert flipped[0] == flipped[2]
    assert flipped[1] == flipped[3] == set(range(53)) - flipped[0]
    assert 15 < len(flipped[0]) < 38


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_pixels_are_those_of_torchvision_within_a_level(photos, interpolation):
    source = ImageFolder(photos, "val")
    resize = v2.Resize(28, interpolation=v2.InterpolationMode(interpolation))
    steps = resize, v2.CenterCrop(24), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)
    reference = v2.Compose([*steps, v2.Normalize(SMALL.mean, SMALL.std)])
    pictures = [Image.open(source.name(i)).convert("RGB") for i in range(len(source))]
    expected = torch.stack([*map(reference, pictures)])
    for backend in BACKENDS:
        transform = replace(SMALL, interpolation=interpolation)
        images, labels = take(loader(photos, transform, training=False, backend=backend))
        assert labels.tolist() == source.labels.tolist()
        assert 255 * 0.229 * (images - expected).abs().max() < 1.1


def of_ranks(world_size, make):
    """Return the loaders of all ranks, which ``make`` makes."""
    return [make(rank=rank, world_size=world_size) for rank in range(world_size)]


def take_in_turn(ranks):
    """Return the images and labels of global batches: of each rank's in turn."""
    return take(block for round_ in zip(*ranks, strict=True) for block in round_)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_evaluation_covers_each_image_once_on_any_number_of_ranks(photos, backend):
    options = {"training": False, "backend": backend, "micro_batch_size": 4}
    for world_size in (2, 30):
        shares = of_ranks(world_size, partial(loader, photos, **options))
        for _ in range(2):
            sizes = [[len(batch.labels) for batch in share] for share in shares]
            assert sum(map(sum, sizes)) == 23
        assert max(map(max, filter(None, sizes))) <= 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_global_batches_do_not_depend_on_the_number_of_ranks_or_on_breaks(photos, backend):
    kept = [*loader(photos, backend=backend)]  # and are not overwritten by later ones
    alone = take(loader(photos, backend=backend))
    assert_same((torch.cat([b.images for b in kept]), torch.cat([b.labels for b in kept])), alone)
    broken = loader(photos, backend=backend)
    parts = take(broken, 2), take(broken)  # an iteration that is abandoned can be continued
    assert_same(map(torch.cat, zip(*parts, strict=True)), alone)
    for world_size, micro in ((1, 4), (2, 6), (2, 3), (4, 3), (3, 2)):
        make = partial(loader, photos, backend=backend, micro_batch_size=micro)
        assert_same(take_in_turn(of_ranks(world_size, make)), alone)


@pytest.fixture
def state(photos):
    return loader(photos, backend="torchvision").state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 2, "batch_size": 24}, "batch_size 12, now it is 24"),
        ({"micro_batch_size": 6}, "micro_batch_size 12, now it is 6; resume.reshard=true"),
        ({"world_size": 2, "micro_batch_size": 6}, "micro_batch_size"),
        ({"seed": 5}, "seed 0, now it is 5: the order of images would not be the same"),
    ],
)
def test_a_state_with_other_settings_or_files_is_refused(photos, state, tmp_path, change, message):
    refused(message, loader(photos, backend="torchvision", **change).load_state_dict, state)
    (tmp_path / "train").symlink_to(photos / "train")
    ours = loader(tmp_path, backend="torchvision")
    ours.load_state_dict(state)  # the same files at another path
    for key in ("files", "source", "version"):
        other = state | {"fingerprint": state["fingerprint"] | {key: "another"}}
        message = f"saved with {key} another, now it is"
        refused(message, ours.load_state_dict, other, reshard=True)


def test_a_damaged_state_is_refused_and_moves_nothing(photos):
    ours = loader(photos, backend="torchvision")
    whole = ours.state_dict()
    damaged = [[], None, {}]
    for key in whole:
        damaged.append({name: value for name, value in whole.items() if name != key})
        damaged += [whole | {key: value} for value in (None, -1, 1.5, 10**400, "x", [], [[]])]
    for key in whole["fingerprint"]:
        damaged += [whole | {"fingerprint": whole["fingerprint"] | {key: v}} for v in (None, [[]])]
    for state in damaged:
        with pytest.raises(DataError) as error:
            ours.load_state_dict(state)
        assert "\n" not in str(error.value)
        assert ours.state_dict() == whole


def test_another_backend_or_version_is_reported(photos, state):
    assert loader(photos, backend="torchvision").load_state_dict(state) == []
    (change,) = loader(photos, backend="dali-cpu").load_state_dict(state)
    assert change.startswith("the input's back end is now dali-cpu 2")
    assert "was torchvision 0" in change
    state["made_with"]["largebatch"] = "0.0.1"
    (change,) = loader(photos, backend="torchvision").load_state_dict(state)
    assert "was 0.0.1: pixels may differ in their last bit" in change


def test_the_keys_of_a_state_are_those_of_earlier_versions(photos, state):
    """Checkpoints hold them, so a renamed key would be reported as a change."""
    assert sorted(state) == ["fingerprint", "made_with", "position"]
    made_with = {"largebatch", "the form of images", "the input's back end"}
    assert state["made_with"].keys() == made_with
    names = "batch_size files images micro_batch_size repeats seed source version world_size"
    assert sorted(state["fingerprint"]) == names.split()
    assert state["fingerprint"].pop("repeats") == 1  # which an earlier version did not have
    loader(photos, backend="torchvision").load_state_dict(state)


def test_resharding_continues_with_the_images_not_yet_seen(photos):
    whole = take(loader(photos, backend="torchvision"))
    first = loader(photos, backend="torchvision")
    take(first, 3)
    ranks = of_ranks(3, partial(loader, photos, backend="torchvision", micro_batch_size=4))
    for rank in ranks:
        rank.load_state_dict(first.state_dict(), reshard=True)
    assert torch.equal(take_in_turn(ranks)[0], whole[0][36:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_are_prefetched_while_a_step_runs(photos, backend):
    """Two batches are read before the consumer requests them."""
    source = loader(photos, backend=backend, epochs=None, prefetch=2)
    seen = []
    inner = source.source.read
    source.source.read = lambda indices: (seen.append(len(indices)), inner(indices))[1]
    batches = iter(source)
    next(batches)
    deadline = time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(seen) >= 3
    assert source.wait_seconds > 0


def test_synthetic_batches_do_not_depend_on_the_number_of_ranks():
    source, options = Synthetic(100, 7), {"batch_size": 8, "epochs": 1}
    alone = take(Loader(source, SMALL, micro_batch_size=4, **options))
    assert alone[0].shape == (96, 3, 24, 24)  # 12.5 batches, rounded to whole ones
    assert set(alone[1].tolist()) <= {*range(7)}
    ranks = of_ranks(2, partial(Loader, source, SMALL, micro_batch_size=4, **options))
    assert_same(take_in_turn(ranks), alone)
    other = take(Loader(source, SMALL, seed=2**63 - 1, **options))
    assert not torch.equal(other[0], alone[0])


def test_closing_an_iteration_does_not_wait_for_its_thread():
    """The garbage collector may close it in a thread that holds a lock the other thread needs."""
    release = threading.Event()

    def items():
        yield 1
        release.wait()
        yield 2

    iteration = prefetch(items(), 2)
    assert next(iteration) == 1
    closing = threading.Thread(target=iteration.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    release.set()


def test_cuda_is_the_current_gpu_and_is_not_initialised_before_the_first_batch(photos, monkeypatch):
    """Otherwise a launcher that checks a recipe would allocate memory on GPU 0."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("the GPU was initialised"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend in ("torchvision", "dali-gpu"):
        for name, number in (("cuda:1", 1), ("cuda", 3)):
            made = loader(photos, device=name, backend=backend)
            assert made.device == torch.device("cuda", number)


@pytest.mark.parametrize(
    ("ranks", "own", "of_torchrun", "threads"),
    # The last two are bound to one of two NUMA nodes with another rank, and to cores of their own.
    [(1, 3, 8, 3), (2, 8, 8, 4), (8, 4, 8, 1), (4, 4, 8, 2), (2, 2, 8, 2)],
)
def test_a_rank_decodes_on_its_share_of_the_cores(
    photos, monkeypatch, ranks, own, of_torchrun, threads
):
    cores = {0: {*range(own)}, os.getppid(): {*range(of_torchrun)}}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    source = loader(photos, backend="torchvision", threads=None)
    assert (source.threads, source.cores) == (threads, threads)
    assert loader(photos, backend="torchvision", threads=5).threads == 5
