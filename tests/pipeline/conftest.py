"""The photos in every format that is read."""

import pytest

from tests.pipeline.formats import SHARDS, write_data_set


@pytest.fixture(scope="session")
def stored(photos, tmp_path_factory):
    """The photos as folders and as shards with an index, in ``root/format/split``."""
    root = tmp_path_factory.mktemp("stored")
    (root / "folder").symlink_to(photos)
    for form in SHARDS:
        write_data_set(form, root / form, photos, images_per_shard=20)
    return root
