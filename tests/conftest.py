"""Small data sets for all tests, their order, Triton's interpreter, and reasons of slow tests."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

from largebatch.pipeline import DataError
from tests.ranks import heed_signals

# Without a GPU, Triton's kernels run in its interpreter. The variable must be set before Triton is
# imported, which timm and torchvision do.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

heed_signals()

# The duration of an example depends on the machine's other load. Examples are the same in every
# run, so that a run that passed here passes in CI too. Before a property is relied on, look for
# others: `pytest -m hypothesis --hypothesis-profile explore tests/ROOM`.
settings.register_profile("largebatch", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("largebatch")


# A test that takes longer on a quiet machine must be marked slow, with a reason.
SLOW_SECONDS = 5


def check_slow(items):
    """Check that each slow test states why it is slow."""
    for item in items:
        for marker in item.iter_markers("slow"):
            reason = marker.args[0] if len(marker.args) == 1 else None
            if not isinstance(reason, str) or not reason.strip() or marker.kwargs:
                raise pytest.UsageError(
                    f"{item.nodeid}: slow: no reason is given; "
                    'valid: @pytest.mark.slow("trains on 4 ranks")'
                )


def unmarked(reports):
    """Return the reports of long phases of tests that are not marked slow, longest first."""
    found = [r for r in reports if r.duration > SLOW_SECONDS and "slow" not in r.keywords]
    return sorted(found, key=lambda report: -report.duration)


def shuffle(items, seed):
    """Put the files in a random order, and the tests of each file, in place."""
    generator = random.Random(seed)
    files = sorted({item.path for item in items})
    order = dict(zip(files, generator.sample(range(len(files)), len(files)), strict=True))
    generator.shuffle(items)
    items.sort(key=lambda item: order[item.path])


def pytest_addoption(parser):
    parser.addoption("--order", metavar="SEED", help="run the tests in a random order")
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    check_slow(items)
    if seed := config.getoption("order"):
        shuffle(items, seed)


def pytest_report_header(config):
    return f"order: {config.getoption('order') or 'of the files'}"


def pytest_terminal_summary(terminalreporter):
    reports = [
        report
        for outcome in ("passed", "failed", "error")
        for report in terminalreporter.stats.get(outcome, ())
        if hasattr(report, "duration")
    ]
    if found := unmarked(reports):
        terminalreporter.section(f"over {SLOW_SECONDS} s and not marked slow", sep="-")
        for report in found:
            terminalreporter.line(f"{report.duration:6.1f}s {report.when:8} {report.nodeid}")


def refused(message: str, function: Callable[..., object], *arguments: object, **options: object):
    """Check that a call raises a DataError whose message has a match of ``message``."""
    with pytest.raises(DataError, match=message):
        function(*arguments, **options)


#: What a path may be that is no file of an image, by name: what makes it.
SPECIAL: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terabyte": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
}


def write_images(folder: Path, counts: dict[str, int], seed: int = 0) -> None:
    """Write smooth random JPEG files of various sizes, ``counts[class]`` per class folder."""
    generator = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            coarse = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
            size = tuple(int(v) for v in generator.integers(24, 90, 2))
            image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
            image.save(folder / name / f"{i:03d}.JPEG", quality=92)


@pytest.fixture(autouse=True)
def _products_round_as_before():
    """Fail a test that leaves a lower precision of FP32 products to the tests after it."""

    def lowered():
        backends = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
        return [backend.fp32_precision in ("tf32", "bf16") for backend in backends]

    before = lowered()
    yield
    after = lowered()
    if after != before:
        torch.set_float32_matmul_precision("highest")
    assert after == before


@pytest.fixture
def golden(request):
    """Return a function that compares a screen with ``golden/NAME.txt`` beside the test.

    It takes the name, and what the screen shows by the title of each case. ``--update-golden``
    writes the file anew, for a reader of the change to judge.
    """

    def compare(name: str, shown: dict[str, str]) -> None:
        path = request.path.parent / "golden" / f"{name}.txt"
        text = "\n".join(f"=== {title}\n{lines.rstrip()}\n" for title, lines in shown.items())
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), "if this is meant: --update-golden"

    return compare


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A data set of 3 classes: 53 images to train on, 23 to evaluate."""
    root = tmp_path_factory.mktemp("photos")
    write_images(root / "train", {"ant": 20, "bee": 16, "cat": 17})
    write_images(root / "val", {"ant": 9, "bee": 1, "cat": 13}, seed=1)
    return root


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The digits data set that scikit-learn ships."""
    from largebatch.pipeline import prepare_digits

    root = tmp_path_factory.mktemp("data") / "digits"
    prepare_digits(root)
    return root
