"""The import graph has no cycles, independent packages, and no imports of a higher level."""

from functools import partial
from pathlib import Path

import pytest

from tests.imports import (
    import_cycles,
    imports_between,
    imports_by_others,
    imports_of_internals,
    read_graph,
    upward_imports,
)

ROOT = Path(__file__).parents[1]
INDEPENDENT = ("lars", "amp", "comm", "pipeline")
PACKAGES = (*INDEPENDENT, "recipes")
# Modules and subpackages from the lowest level to the highest; `<` parts the levels.
ORDER = {
    "lars": "names < capture conventions reference span memory groups sharding schedules "
    "< batches coefficients options state < foreach fused masters scheduler state_dicts triton "
    "< implementations layerwise < muon optimizer < history noise range_test",
    "amp": "names < forms gradients < loaded skips < convert loss_scale masters "
    "< overflow statistics < precision < underflow",
    "comm": "names failure collectives fusion ranges < node_memory < topology < traffic "
    "< algorithms < plan < execute launch_order refusals < averaging < model fsdp2 hook < tuning",
    "pipeline": "errors progress order < sources < decode < loader stages fingerprint stalls "
    "< audit < prepare",
    # A run that ends draws the picture that the command `report` draws.
    "recipes": "errors launcher words files < output < published < schema < ranks < models "
    "< training report < mlperf < train < trained < predict < tune < commands < __main__",
}
# The packages through which recipes may use the others.
INTERFACES = (*INDEPENDENT, "pipeline.audit", "pipeline.prepare")


@pytest.fixture(scope="module")
def graph():
    return read_graph(ROOT, PACKAGES)


#: What is looked for in the tree, by the rule that it would break.
RULES = {
    "there are no import cycles": import_cycles,
    "independent packages import only themselves": lambda g: imports_between(g, INDEPENDENT),
    **{
        f"modules of {package} import only lower levels": partial(
            upward_imports, package=package, order=levels.split(" < ")
        )
        for package, levels in ORDER.items()
    },
    "triton is imported for the table of implementations only": partial(
        imports_by_others, package="lars.triton", allowed=["lars.implementations"]
    ),
    # The hooks report failures; algorithms, plans and measurements know nothing of them.
    "only the hooks import failure reports": partial(
        imports_by_others, package="comm.failure", allowed=["comm", "comm.fsdp2", "comm.hook"]
    ),
    # The screen stands on what a run measures and leaves, neither of which knows of it.
    "only the trainer imports what a run shows": partial(
        imports_by_others,
        package="recipes.training.screen",
        allowed=["recipes.training.run", "recipes.training.trainer"],
    ),
    "recipes import packages by their interfaces": partial(
        imports_of_internals, importer="recipes", interfaces=INTERFACES
    ),
    # So that no module is loaded twice, as `lars` and as `largebatch.lars`.
    "imports within the package are relative": lambda graph: graph.absolute,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_its_rules(graph, rule):
    faults = RULES[rule](graph)
    assert not faults, "\n" + "\n".join(faults)


def test_the_graph_covers_the_tree(graph):
    """The reader finds every file and resolves modules, names in modules and packages."""
    assert len(graph.modules) == sum(
        len(list((ROOT / package).rglob("*.py"))) for package in PACKAGES
    )
    edges = {(one.importer, one.imported) for one in graph.imports}
    assert {
        ("lars.implementations", "lars.triton.step"),
        ("comm", "comm.algorithms"),
        ("recipes.training.step", "comm"),
        ("recipes.train", "recipes.ranks"),
    } <= edges
    assert {b.split(".")[0] for a, b in edges if a.startswith("recipes.")} == set(PACKAGES)


# --- each fault is found in a tree made for it ----------------------------------------------


VALID = {
    "low/__init__": "from .base import x\n__all__ = ['x', 'side']",
    "low/side": "from . import base\nimport os",
    "low/wing/part": "from ..base import x\nfrom . import other",
    "also/__init__": "",
    "high/__init__": "from ... import __version__",
    "high/third": "from ..low import x, side",  # `side` is a public name of `low`, too
}
FAULTY = {
    "low/wing/other": "if TYPE_CHECKING:\n    from .part import x",  # a cycle
    # A cycle through the __init__ of a subpackage, which is also for one module alone.
    "low/base": "import largebatch.low\nfrom .wing import x",
    "low/wing/__init__": "from ..base import x",
    "also/one": "def f():\n    from ..high.first import x",  # independent; in a function no cycle
    "high/first": "if TYPE_CHECKING:\n    from .second import x\nfrom ..also import one",
    "high/second": "from ..low.base import x\nfrom low.base import x",  # internals
}


def test_each_fault_is_found(tmp_path):
    for name, text in (VALID | FAULTY).items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = read_graph(tmp_path, ["low", "also", "high"])
    assert [
        *import_cycles(graph),
        *imports_between(graph, ["low", "also"]),
        *upward_imports(graph, "low", ["base", "wing side"]),
        *upward_imports(graph, "high", ["first", "second third"]),
        *imports_by_others(graph, "low.wing", ["low.side"]),
        *imports_of_internals(graph, "high", ["low", "also", "also.one"]),
        *graph.absolute,
    ] == [
        "cycle: low/base.py:2: low.base imports low.wing; "
        "low/wing/__init__.py:1: low.wing imports low.base",
        "cycle: low/wing/other.py:2: low.wing.other imports low.wing.part; "
        "low/wing/part.py:2: low.wing.part imports low.wing.other",
        "also/one.py:2: also.one imports high.first; also may import nothing but itself",
        "low/base.py:2: low.base imports low.wing; base is below wing",
        "high/first.py:2: high.first imports high.second; first is below second",
        "low/base.py:2: low.base imports low.wing; only low.side may",
        "high/second.py:1: high.second imports low.base; import it from low",
        "high/second.py:2: high.second imports low.base by its absolute name",
        "low/base.py:1: low.base imports largebatch.low by its absolute name",
    ]
