"""What tests of the report share."""

import pytest

from tests.recipes.report.written_runs import write_run


@pytest.fixture
def run_of(tmp_path):
    """Return a function that writes a run into a new folder and returns the folder."""

    def write(name, *keys, **options):
        write_run(tmp_path / name, *keys, **options)
        return tmp_path / name

    return write
