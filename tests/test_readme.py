"""README.md and the other documents: snippets run as printed, and named files and keys exist."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer.main
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import largebatch
from largebatch.recipes import load
from largebatch.recipes.commands.tree import app
from tests.conftest import write_images
from tests.ranks import run_ranks, start_module

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_generated" not in p.parts),
]

SNIPPETS = dict(
    found
    for document in (
        "README.md",
        "docs/concepts/precisions.md",
        *("docs/guides/own-code.md", "docs/guides/self-supervised.md"),
    )
    for found in re.findall(
        r"<!-- snippet: (\w+) -->\n```python\n(.*?)```",
        (ROOT / document).read_text(encoding="utf-8"),
        re.DOTALL,
    )
)

#: What the snippets assume: a model, a loss, a batch and a device.
PRELUDE = """
import torch
from torch import nn

from largebatch.lars import LARS, split_parameters

device = "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 4, 3, stride=8), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(4, 3),
)
criterion = nn.CrossEntropyLoss()
images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 3
"""


def run(code, folder):
    """Run code in a new process, as a reader would run a file."""
    file, out = folder / "snippet.py", folder / "out"
    file.write_text(PRELUDE + code)
    process = start_module(str(file), [], out, cwd=folder, environment={"CUDA_VISIBLE_DEVICES": ""})
    process.join(300)
    assert process.exitcode == 0, out.read_text()


def test_readme_is_short_and_so_are_the_snippets():
    assert len(README.splitlines()) <= 110
    assert len(README.split()) <= 900
    assert SNIPPETS.keys() == {"lars", "precision", "hook", "loader", "simclr"}
    for name, code in SNIPPETS.items():
        assert len(code.splitlines()) <= (29 if name == "simclr" else 8), name


@pytest.mark.slow("makes an environment")
def test_the_install_block_can_be_pasted(tmp_path):
    """All but its last line, which would download torch; of that, the extras exist."""
    (block,) = re.findall(r"## Install\n\n```sh\n(.*?)```", README, re.DOTALL)
    first, *lines, last = block.splitlines()
    assert first.startswith("REPOSITORY=")
    (tmp_path / "git").write_text('#!/bin/sh\n[ "$1" = clone ] && cp -r "$2" "$3"\n')
    (tmp_path / "git").chmod(0o755)
    source = tmp_path / "its repository"
    source.mkdir()
    shutil.copy(ROOT / "pyproject.toml", source)
    lines = [line.replace("python3 ", f"{shlex.quote(sys.executable)} ") for line in lines]
    script = [f"set -e\nREPOSITORY={shlex.quote(str(source))}", *lines]
    result = subprocess.run(
        ["bash", "-c", "\n".join([*script, "ls pyproject.toml", "which pip"])],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.split()[-1]) == tmp_path / "largebatch" / ".venv" / "bin" / "pip"
    (extras,) = re.fullmatch(r'pip install -c constraints\.txt -e "\.\[([\w,]+)\]"', last).groups()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


IMAGES = {"ant": 20, "bee": 16, "cat": 17}
#: By name of a snippet: what is smaller in it here, the code before it, and checks after it.
RUNS = {
    "lars": (
        None,
        "before = model[0].weight.clone()",
        """
for step in range(3):
    criterion(model(images), labels).backward()
    optimizer.step()
    scheduler.step()
assert not torch.equal(model[0].weight, before)
assert scheduler.get_last_lr()[0] == schedule(3)
assert {group["adapt"] for group in groups} == {True, False}
""",
    ),
    "precision": (
        None,
        "weight = model[0].weight.detach().clone()",
        """
assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.float16
assert model[1].weight.dtype == torch.float32
assert torch.isfinite(loss) and precision.skipped_steps == 0
assert not torch.equal(model[0].weight.float(), weight)
""",
    ),
    "loader": (
        ("8192, micro_batch_size=128, epochs=90", "256, micro_batch_size=128, epochs=4"),
        """
class Counting(LARS):
    def step(self, closure=None):
        global updates
        updates += 1
        return super().step(closure)

updates = 0
optimizer = Counting(split_parameters(model, weight_decay=5e-5), lr=0.1)
""",
        """
assert loader.accumulation == 2
assert updates == loader.total_steps == 1  # 53 images, 4 times
assert i == loader.accumulation * updates
assert images.shape == (128, 3, 224, 224)
""",
    ),
    # Of 53 images: from the second epoch on, the crops of one begin at an odd place of it.
    "simclr": (
        ("batch_size=512, repeats=2, epochs=100", "batch_size=16, repeats=2, epochs=4"),
        "weight = model[0].weight.detach().clone()",
        """
assert not torch.equal(model[0].weight, weight)
again = [*Loader(ImageFolder("data"), crops, batch_size=16, repeats=2, epochs=4)]
assert len(again) == loader.total_steps == 13
for images, labels in again:
    assert torch.equal(labels[::2], labels[1::2])
    assert (images[::2] != images[1::2]).flatten(1).any(1).all()
apart = nt_xent(torch.eye(8).repeat_interleave(2, 0), 0.5)  # of 15 others, one at 1 and 14 at 0
assert abs(apart - torch.tensor(1 + 14 * torch.e**-2).log()) < 1e-6
assert nt_xent(torch.eye(8).repeat(2, 1), 0.5) > apart + 1
""",
    ),
}


@pytest.mark.slow("starts a program that imports torch and DALI")
@pytest.mark.parametrize("name", RUNS)
def test_a_snippet_runs_as_printed(tmp_path, name):
    smaller, before, after = RUNS[name]
    write_images(tmp_path / "data" / "train", IMAGES)
    code = SNIPPETS[name]
    if smaller:
        assert smaller[0] in code
        code = code.replace(*smaller)
    run(f"{before}\n{code}{after}", tmp_path)


def reduced_by_the_snippet():
    """Return the plan of the snippet and the gradients that its hook averaged, on one rank."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    names = {"model": model, "DistributedDataParallel": DistributedDataParallel}
    exec(SNIPPETS["hook"], names)
    inputs = torch.full((1, 5), float(dist.get_rank() + 1))
    names["ddp"](inputs).sum().backward()
    return names["plan"], [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow("starts two ranks")
def test_the_hook_snippet_averages_gradients_over_two_ranks():
    for _, (weight, bias) in run_ranks(2, reduced_by_the_snippet):
        assert torch.equal(weight, torch.full((3, 5), 1.5))
        assert torch.equal(bias, torch.ones(3))


@pytest.mark.parametrize("document", DOCUMENTS[:2], ids=lambda path: path.name)
def test_relative_links_outside_code_lead_to_files(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            assert (document.parent / target.partition("#")[0]).exists(), target


#: Paths in documents that are outside the repository: a user's data, runs and results.
_OTHERS = re.compile(
    r"^(/|~|\.\./|\.venv/|build/|checkpoints/|data/|path/|profile/|results/|runs/|tensorboard/|test/|train/"
    r"|val/)"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_modules_and_make_targets_that_a_document_names_exist(document):
    text = document.read_text(encoding="utf-8")
    for token in re.findall(r"`([\w./*-]+)`", text):
        is_path = "/" in token and (token.endswith("/") or re.search(r"\.(py|md|ya?ml|sh)$", token))
        if is_path and not _OTHERS.match(token):
            assert list(ROOT.glob(token.rstrip("/"))), f"{document.name} names {token}"
    for module in set(re.findall(r"-m ((?:benchmarks|largebatch|tests)\.[\w.]+\w)", text)):
        path = ROOT / module.removeprefix("largebatch.").replace(".", "/")
        files = [f for f in (path.with_suffix(".py"), path / "__main__.py") if f.exists()]
        assert any("__main__" in f.read_text(encoding="utf-8") for f in files), module
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def blocks(document, *languages):
    """Yield the code blocks of a document in one of ``languages``."""
    text = document.read_text(encoding="utf-8")
    for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if language in languages:
            yield code


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_a_document_parses_and_imports_existing_names(document):
    for code in blocks(document, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("largebatch"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_have_valid_recipes_keys_commands_and_options(
    document, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for code in blocks(document, "yaml"):
        if named := re.match(r"# (\w+\.yaml)\n", code):  # a reader's own, of this document
            Path(named[1]).write_text(code, encoding="utf-8")
    for line in "".join(blocks(document, "sh")).replace("\\\n", " ").splitlines():
        trains = r"(?:largebatch (?:train|schedule)|-m largebatch.recipes.train) (.*)"
        if match := re.search(trains, line):
            recipe, *words = shlex.split(match[1], comments=True)
            values = [word for word in words if re.match(r"[a-z_.]+=", word)]
            if recipe != "RECIPE" and not recipe.startswith("tuning/"):  # a search's
                load(recipe, values)
        if not line.startswith("largebatch "):
            continue
        command, words = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
        while getattr(command, "commands", {}) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert not getattr(command, "commands", {}) or command.name == "recipes", line
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for word in words:
            assert not word.startswith("--") or word in options, f"{word} in {line}"


def test_the_citation_is_of_this_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # the format's own
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == largebatch.__version__
    assert citation["license"] == project["license"]
