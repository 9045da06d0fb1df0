"""What tests of recipes share."""

import pytest

from tests.recipes.runs import make, train, weights


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    """Drawing takes longer than training here."""
    if "pictures" not in request.keywords:
        monkeypatch.setattr(
            "largebatch.recipes.training.results.write_report", lambda run_dir, title: run_dir
        )


@pytest.fixture(scope="module")
def alone(photos, tmp_path_factory):
    """Weights before and after training on one process."""
    folder = tmp_path_factory.mktemp("alone")
    return weights(make(photos, folder / "start")), train(photos, folder / "run")
