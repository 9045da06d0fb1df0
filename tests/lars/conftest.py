"""Marks the tests that interpret Triton's kernels as slow, so that `make check` leaves them out."""

import pytest

REASON = "interprets Triton kernels"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("implementation") == "triton" and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.slow(REASON))
