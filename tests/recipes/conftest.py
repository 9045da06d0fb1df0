"""What tests of recipes share."""

import pytest

from tests.recipes.hub import hub as hub
from tests.recipes.runs import double_precision, make, train, weights
from tests.recipes.training.small import small as small


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    """Drawing takes longer than training here."""
    if "pictures" not in request.keywords:
        monkeypatch.setattr(
            "largebatch.recipes.training.screen.closing.write_picture",
            lambda run_dir, title: run_dir,
        )


@pytest.fixture(scope="session")
def exact(photos, tmp_path_factory):
    """Weights before and after training on one process, in double precision."""
    folder = tmp_path_factory.mktemp("exact")
    with double_precision():
        return weights(make(photos, folder / "start")), train(photos, folder / "run")
