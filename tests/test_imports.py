"""Who imports whom: no circles, rooms that do not know each other, wings that look down only."""

from pathlib import Path

import pytest

from tests.imports import (
    circles,
    imports_by_others,
    imports_of_other_rooms,
    imports_past_a_face,
    read_graph,
    upward_imports,
)

ROOT = Path(__file__).parents[1]
GROUND = ("lars", "amp", "comm", "pipeline")
ROOMS = (*GROUND, "recipes")
# From the lowest to the highest; wings in one string are on one level.
ORDER = {
    "lars": (
        "reference span memory groups sharding schedules",
        "coefficients",
        "foreach fused triton",
        "optimizer",
        "history",
    ),
    "amp": ("forms", "convert loss_scale masters", "precision", "fastest underflow"),
    "comm": (
        "failure topology collectives fusion",
        "traffic",
        "algorithms",
        "plan",
        "execute",
        "model",
        "tuning",
        "hook",
    ),
    "pipeline": (
        "errors progress order",
        "sources",
        "decode",
        "loader stages fingerprint stalls",
        "audit",
        "prepare",
    ),
    "recipes": (
        "errors",
        "schema",
        "ranks",
        "models",
        "training",
        "mlperf",
        "train",
        "predict",
        "tune",
        "commands",
        "tune_comm",
    ),
}
# By what the upper floor may call the rooms below it.
FACES = (*GROUND, "pipeline.audit", "pipeline.prepare")


@pytest.fixture(scope="module")
def graph():
    return read_graph(ROOT, ROOMS)


def assert_none(faults):
    assert not faults, "\n" + "\n".join(faults)


def test_no_circle(graph):
    assert_none(circles(graph))


def test_ground_floor_rooms_import_only_themselves(graph):
    assert_none(imports_of_other_rooms(graph, GROUND))


@pytest.mark.parametrize("room", ROOMS)
def test_wings_import_only_wings_below_them(graph, room):
    assert_none(upward_imports(graph, room, ORDER[room]))


def test_triton_is_imported_by_the_optimizer_only(graph):
    assert_none(imports_by_others(graph, "lars.triton", ["lars.optimizer"]))


def test_the_failure_wing_stands_beside_the_others(graph):
    """The hook reports failures; algorithms, plans and measurements know nothing of them."""
    assert_none(imports_by_others(graph, "comm.failure", ["comm", "comm.hook"]))


def test_recipes_import_rooms_by_their_faces(graph):
    assert_none(imports_past_a_face(graph, "recipes", FACES))


def test_imports_within_the_package_are_relative(graph):
    """So that no module is loaded twice, as ``lars`` and as ``largebatch.lars``."""
    assert_none(graph.absolute)


def test_the_graph_is_the_tree(graph):
    """The reader sees every file and resolves names of modules, names in modules and faces."""
    assert len(graph.modules) == sum(len(list((ROOT / room).rglob("*.py"))) for room in ROOMS)
    edges = {(one.importer, one.imported) for one in graph.imports}
    assert {
        ("lars.optimizer", "lars.triton.step"),
        ("comm", "comm.algorithms"),
        ("recipes.training.ddp", "comm"),
        ("recipes.train", "recipes.ranks"),
    } <= edges
    assert {b.split(".")[0] for a, b in edges if a.startswith("recipes.")} == set(ROOMS)


# --- each fault is found, in a tree made for it ---------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A sound tree of three rooms, two on the ground floor; files are added by name."""

    def write(files=None):
        texts = {
            "low/__init__": "from .base import x\n__all__ = ['x', 'side']",
            "low/base": "x = 1",
            "low/side": "from . import base\nimport os",
            "low/wing/__init__": "",
            "low/wing/part": "from ..base import x\nfrom . import other",
            "low/wing/other": "from .. import base",
            "also/__init__": "",
            "high/__init__": "from ... import __version__",
            "high/first": "from ..low import x, side",
            "high/second": "from . import first",
            **(files or {}),
        }
        for name, text in texts.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_graph(tmp_path, ["low", "also", "high"])

    return write


def all_faults(graph):
    return [
        *circles(graph),
        *imports_of_other_rooms(graph, ["low", "also"]),
        *upward_imports(graph, "low", ["base", "wing side"]),
        *upward_imports(graph, "high", ["first", "second"]),
        *imports_by_others(graph, "low.wing", ["low.side"]),
        *imports_past_a_face(graph, "high", ["low", "also"]),
        *graph.absolute,
    ]


def test_a_sound_tree_has_no_fault(tree):
    graph = tree()
    assert all_faults(graph) == []
    # `side` is a file of `low` and a name that `low` shows: the name is what is imported.
    found = [(one.imported, one.line) for one in graph.imports if one.importer == "high.first"]
    assert found == [("low", 1)]


FAULTS = {
    "circle": (
        {"low/wing/other": "x = 1\nfrom .part import x"},
        [
            "circle: low/wing/other.py:2: low.wing.other imports low.wing.part; "
            "low/wing/part.py:2: low.wing.part imports low.wing.other"
        ],
    ),
    "circle through the face of a wing": (
        {"low/side": "from .wing.other import x", "low/wing/__init__": "from ..side import x"},
        [
            "circle: low/side.py:1: low.side imports low.wing.other; "
            "low/wing/__init__.py:1: low.wing imports low.side"
        ],
    ),
    "a room imports its neighbour": (
        {"also/one": "\n\nfrom ..low import x"},
        ["also/one.py:3: also.one imports low; also may import nothing but itself"],
    ),
    "a room imports the floor above, in a function": (
        {"also/one": "def f():\n    from ..high.first import x"},
        ["also/one.py:2: also.one imports high.first; also may import nothing but itself"],
    ),
    "upward": (
        {"low/base": "def f():\n    from .side import x"},
        ["low/base.py:2: low.base imports low.side; base is below side"],
    ),
    "upward, for types": (
        {"high/first": "if TYPE_CHECKING:\n    from .second import x"},
        ["high/first.py:2: high.first imports high.second; first is below second"],
    ),
    "upward, to the face": (
        {"low/side": "def f():\n    from . import x"},
        ["low/side.py:2: low.side imports low; side is below the face of low"],
    ),
    "no place": (
        {"high/third": ""},
        ["high/third.py: high.third has no place in the order of high"],
    ),
    "a wing for one module": (
        {
            "low/base": "",
            "high/first": "",
            "low/side": "from .wing import part",
            "low/wing/part": "",
            "low/__init__": "from .wing import part",
        },
        ["low/__init__.py:1: low imports low.wing.part; only low.side may"],
    ),
    "past a face": (
        {"high/first": "from ..low.base import x"},
        ["high/first.py:1: high.first imports low.base; import it from low"],
    ),
    "absolute": (
        {"low/base": "import largebatch.low", "high/first": "from low.base import x"},
        [
            "high/first.py:1: high.first imports low.base by its absolute name",
            "low/base.py:1: low.base imports largebatch.low by its absolute name",
        ],
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found(tree, kind):
    files, messages = FAULTS[kind]
    assert all_faults(tree(files)) == messages


def test_a_circle_that_no_import_executes_is_none(tree):
    graph = tree({"low/wing/other": "def f():\n    from .part import x"})
    assert circles(graph) == []
