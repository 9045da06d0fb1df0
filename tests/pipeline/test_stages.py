"""Stages of image size and batch size in the loader."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import ImageFolder, Loader, Stage, Synthetic, Transform
from largebatch.pipeline.stages import Phase, lay_out
from tests.conftest import refused
from tests.pipeline.loaders import BACKENDS, assert_same

SMALL = Transform(image_size=16, eval_resize=28)
STAGES = (Stage(1.0, image_size=24), Stage(2.0, image_size=32, batch_size=24))


def loader(source, **options):
    options = {"batch_size": 12, "epochs": 3, "threads": 1, "stages": STAGES} | options
    return Loader(source, SMALL, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_change_at_their_epochs_and_every_image_comes_once(photos, backend):
    source = loader(ImageFolder(photos), backend=backend)
    shapes, seen, before = [], [], []
    iterator = iter(source)
    for _ in range(source.total_steps):
        before.append((source.phase.batch_size, source.accumulation, source.phase.image_size))
        batch = next(iterator)
        shapes.append((len(batch.labels), batch.images.shape[-1]))
        seen.append(batch.labels)
    assert next(iterator, None) is None
    # 53 images: 4 batches of 12 are nearest to epoch 1, 5 more to epoch 2, 2 of 24 to epoch 3
    assert shapes == [(12, 16)] * 4 + [(12, 24)] * 5 + [(24, 32)] * 2
    assert before == [(n, 1, size) for n, size in shapes]
    plain = loader(ImageFolder(photos), backend=backend, stages=(), epochs=None)
    order = torch.cat([b.labels for _, b in zip(range(13), plain, strict=False)])
    assert torch.equal(torch.cat(seen), order[: 9 * 12 + 48])


@pytest.mark.parametrize(
    ("backend", "stop"), [*zip(BACKENDS, (3, 4, 10), strict=True), ("torchvision", 1)]
)
def test_a_loader_resumes_in_any_stage_bit_for_bit(photos, backend, stop):
    whole = [*loader(ImageFolder(photos), backend=backend)]
    first = loader(ImageFolder(photos), backend=backend)
    for _ in zip(range(stop), first, strict=False):
        pass
    state = first.state_dict()
    # Batches that were prefetched but not delivered do not count.
    assert state["position"] == sum(len(b.labels) for b in whole[:stop])
    assert first.epoch == pytest.approx(state["position"] / 53)
    second = loader(ImageFolder(photos), backend=backend)
    second.load_state_dict(state)
    for ours, theirs in zip(second, whole[stop:], strict=True):
        assert_same(ours, theirs)


def test_ranks_share_the_batches_of_every_stage(photos):
    alone = [b.labels for b in loader(ImageFolder(photos), backend="torchvision")]
    options = {"backend": "torchvision", "world_size": 2, "micro_batch_size": 3}
    ranks = [loader(ImageFolder(photos), rank=r, **options) for r in range(2)]
    assert ranks[0].accumulation == 2
    blocks = [block.labels for round_ in zip(*ranks, strict=True) for block in round_]
    assert torch.equal(torch.cat(blocks), torch.cat(alone))
    assert ranks[0].micro_batch_size == 6  # twice the batch, twice the micro-batch


@given(
    images=st.integers(1, 2000),
    batches=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    gaps=st.lists(st.floats(0.01, 9), min_size=5, max_size=5),
)
def test_stages_begin_after_whole_batches_near_their_epoch(images, batches, gaps):
    first = Phase(0, 8, batches[0], batches[0])
    epochs = [sum(gaps[: i + 1]) for i in range(len(batches) - 1)]
    stages = [Stage(e, batch_size=b) for e, b in zip(epochs, batches[1:], strict=True)]
    phases = lay_out(first, stages, images=images).phases
    for before, phase, epoch in zip(phases, phases[1:], epochs, strict=False):
        assert (phase.start - before.start) % before.batch_size == 0
        near = phase.start - epoch * images
        assert abs(near) <= before.batch_size / 2 or phase.start == before.start


def test_stages_that_do_not_fit_are_refused():
    first = Phase(0, 8, 12, 6)
    for stages, message in (
        ([Stage(2.0), Stage(1.0)], "a stage from epoch 1 comes after one from 2; valid"),
        ([Stage(1.0, batch_size=15)], "batch_size 15 of the stage from epoch 1 is not a mult"),
        ([Stage(1.0, micro_batch_size=5)], "12 .* is not a multiple of micro_batch_size 5 x 2 ran"),
    ):
        refused(message, lay_out, first, stages, images=50, world_size=2)


def test_a_finished_timeline_is_that_of_the_loader_and_of_no_other_run():
    timeline = lay_out(Phase(0, 16, 12, 6), STAGES, images=53, world_size=2, epochs=3)
    given = Loader(Synthetic(53, 5), SMALL, batch_size=12, world_size=2, timeline=timeline)
    own = loader(Synthetic(53, 5), micro_batch_size=6, world_size=2)
    assert own.timeline == given.timeline == timeline
    assert own.total_steps == timeline.total_steps
    assert [b.images.shape for b in given] == [b.images.shape for b in own]
    for options, message in (
        ({"batch_size": 24}, "was made for batch_size 12; valid here: 24"),
        ({"world_size": 3}, "was made for world_size 2; valid here: 3"),
        ({"source": Synthetic(54, 5)}, "was made for images 53; valid here: 54"),
        ({"epochs": 3}, "already holds micro_batch_size, epochs and stages"),
        ({"training": False}, ".* leave out timeline in evaluation"),
    ):
        options = {"source": Synthetic(53, 5), "batch_size": 12, "world_size": 2} | options
        refused(f"timeline: {message}", Loader, transform=SMALL, timeline=timeline, **options)
