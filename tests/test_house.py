"""The rules of the house that a machine can check, as ceilings that are lowered to their goals.

A figure may not pass its ceiling: who adds lines deletes as many, and lines that move to another
folder take their part of its ceiling along. Nor may a ceiling stay above what was reached; the
message has the figure to lower it to. Ceilings of lines have slack, 5 % and at least 100 lines: a
deletion of a few lines needs no edit here, and a folder at its goal keeps the 5 %.
"""

import ast
import re
from pathlib import Path

import pytest
import yaml

from largebatch.recipes.schema.keys import all_keys
from largebatch.recipes.schema.names import CONFIGS
from tests.imports import read_graph

ROOT = Path(__file__).parents[1]
PRODUCT = ("lars", "amp", "comm", "pipeline", "recipes")
LONGEST_FILE = 400
# Ceilings and goals.
LINES = {  # of Python in all files below these folders
    "amp comm lars pipeline recipes": (36_665, 36_000),
    "recipes": (16_969, 16_000),
    "recipes/commands": (1_799, 1_650),
    "recipes/tune": (2_175, 2_150),
    "recipes/predict": (1_550, 1_250),
    "recipes/report": (650, 650),
    "recipes/trained": (779, 750),
    "recipes/mlperf": (382, 360),
    "recipes/training": (5_821, 5_600),
    "recipes/models": (1_069, 1_100),
    "recipes/schema": (1_905, 1_600),
    "pipeline": (7_699, 7_850),
    "lars": (5_300, 5_300),
    "amp": (2_000, 2_000),
    "comm": (5_000, 5_000),
    "tests": (31_403, 30_000),
    "benchmarks": (9_927, 10_000),
}
RECIPE_IMPORTS = (6, 6)  # files of recipes/training that import Recipe
METRICS_FILES = (3, 3)  # of recipes: one has the name of metrics.jsonl, one writes, one reads it
TRAINER_INIT = (40, 40)  # lines of Trainer.__init__, from `def` on
UNSET_KEYS = (0, 0)  # recipe keys that no packaged recipe sets and no guide names
RECIPE = "recipes.schema.recipe"
METRICS = {"METRICS", "read_lines"}  # names that are imported for metrics.jsonl


def check(what, figure, limit, slack=0, found=()):
    """Fail if the figure is above its ceiling, or the ceiling too far above figure and goal."""
    (ceiling, goal), which = limit, f": {', '.join(sorted(map(str, found)))}" if found else ""
    valid = f"{what}: {figure:,}; valid: at most {ceiling:,} (the goal is {goal:,}){which}"
    assert figure <= ceiling, valid
    reached = max(figure, goal)
    lower = f"{what}: {figure:,}; valid: a ceiling of {reached:,}; lower that of {ceiling:,}"
    assert ceiling <= reached + slack, lower


def lines_by_file(*folders):
    """Lines of each file of Python below the folders, as ``wc -l`` counts them."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): path.read_bytes().count(b"\n") for path in files}


def importers_of_recipe(graph):
    assert RECIPE in graph.modules, f"RECIPE: {RECIPE} is no module; valid: that of Recipe"
    of_recipe = [one for one in graph.imports if one.imported == RECIPE]
    return {one.path for one in of_recipe if one.importer.startswith("recipes.training")}


def files_about_metrics(graph, root):
    """Files that have the name of ``metrics.jsonl``, or import that or what reads the file."""
    taken = {(name, one.path) for one in graph.imports for name in one.names}
    gone = METRICS - {name for name, _ in taken}
    assert not gone, f"METRICS: nothing imports {min(gone)}; valid: the names of today"
    named = {p for p in graph.modules.values() if '"metrics.jsonl"' in (root / p).read_text()}
    return {path for name, path in taken if name in METRICS} | named


def keys_set(recipe, known, section=""):
    """The keys that a recipe's file sets; what it extends is another file."""
    for name, value in recipe.items():
        if section + name in known:
            yield section + name
        elif isinstance(value, dict):
            yield from keys_set(value, known, f"{section}{name}.")


def is_named(key, text):
    """Whether a page names a key: ``data.path`` in full, and ``seed`` as code or as an override."""
    key = re.escape(key)
    return bool(re.search(rf"\b{key}\b" if "." in key else rf"`{key}`|\b{key}=", text))


@pytest.fixture(scope="module")
def graph():
    return read_graph(ROOT, PRODUCT)


@pytest.mark.parametrize("folders", LINES)
def test_folders_keep_to_their_lines(folders):
    lines, limit = sum(lines_by_file(*folders.split()).values()), LINES[folders]
    check(f"lines of {folders}", lines, limit, slack=max(100, limit[0] // 20))


def test_no_file_is_too_long():
    lines = lines_by_file(*PRODUCT, "tests", "benchmarks")
    long = [f"{path}: {n} lines" for path, n in lines.items() if n > LONGEST_FILE]
    assert not long, f"{'; '.join(long)}; valid: at most {LONGEST_FILE}, and rarely above 300"


def test_few_files_of_the_trainer_import_recipe(graph):
    files = importers_of_recipe(graph)
    what = "files of recipes/training that import Recipe"
    check(what, len(files), RECIPE_IMPORTS, found=files)


def test_few_files_know_a_runs_metrics(graph):
    files = files_about_metrics(graph, ROOT)
    check("files that name or read metrics.jsonl", len(files), METRICS_FILES, found=files)


def test_the_trainer_is_made_in_few_lines():
    nodes = ast.parse((ROOT / "recipes/training/trainer.py").read_text()).body
    trainer = next(node for node in nodes if getattr(node, "name", "") == "Trainer")
    init = next(node for node in trainer.body if getattr(node, "name", "") == "__init__")
    lines = init.end_lineno - init.lineno + 1
    check("lines of Trainer.__init__", lines, TRAINER_INIT, slack=10)


def test_a_packaged_recipe_sets_each_key_or_a_guide_names_it():
    known = {key.name for key in all_keys() if "[]" not in key.name}  # entries go with their list
    recipes = [yaml.safe_load(path.read_text()) for path in CONFIGS.glob("*.yaml")]
    unset = known.difference(*(keys_set(recipe, known) for recipe in recipes))
    pages = [
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/guides/*.md"),
        *ROOT.glob("docs/concepts/*.md"),
    ]
    guides = "".join(page.read_text() for page in pages)
    unset = [key for key in unset if not is_named(key, guides)]
    check("recipe keys that none sets and no guide names", len(unset), UNSET_KEYS, found=unset)


# --- each rule can be broken -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        (301, "x: 301; valid: at most 300 (the goal is 200): a, b"),
        (279, "x: 279; valid: a ceiling of 279; lower that of 300"),
        (150, "x: 150; valid: a ceiling of 200; lower that of 300"),
    ],
)
def test_figures_and_ceilings_that_are_too_high_are_found(figure, message):
    check("x", 300, (300, 200), slack=20)
    check("x", 280, (300, 200), slack=20)
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}"):
        check("x", figure, (300, 200), slack=20, found="ba")
