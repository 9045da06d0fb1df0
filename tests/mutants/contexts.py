"""A pytest plugin: coverage is kept for each test, and how long each took is written down."""

import json
import os
from pathlib import Path

import coverage
import pytest

durations: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if measured := coverage.Coverage.current():
        measured.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report):
    durations[report.nodeid] = durations.get(report.nodeid, 0) + report.duration


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if measured := coverage.Coverage.current():
        measured.stop()
        measured.save()
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["LARGEBATCH_DURATIONS"]).write_text(json.dumps(durations, indent=0))
