"""`largebatch plan`, as a user runs it."""

import json

import pytest

from tests.recipes.commands.test_app import run

#: A network that is counted quickly, in a large recipe.
PLAN = ("plan", "resnet50-b65536", "model.name=test_resnet", "data.image_size=32",
        "data.eval_resize=32")  # fmt: skip
OWN = ("--measured", "128:1000", "--links", "nvlink4+ndr-x8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow("counts ten passes")
def test_tables_fit_100_columns(folder, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    keys = ("ema.decay=0.9", "--gpus", "8,1024", "--price-per-gpu-hour", "3")
    result = run(*PLAN, *OWN, *keys)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("resnet50-b65536: batch 65,536, 89.01 epochs, 1,740 steps, 23 eval")
    rows = [line.split() for line in lines]
    assert ["8", "128", "64", "128"] in [row[:4] for row in rows]
    assert ["1,024", "64", "1", "64"] in [row[:4] for row in rows]
    assert "not counted: the CUDA context" in " ".join(result.output.split())
    assert any(line.startswith("1,024 GPUs need micro_batch_size=64") for line in lines)
    assert list(folder.iterdir()) == []


def test_json_has_every_number(folder):
    result = run(*PLAN, "--measured", "128:1000", "--gpus", "1", "--json")  # without links
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    (point,) = found["points"]
    assert (point["accumulation"], point["micro_batch_size"]) == (512, 128)
    seconds = point["seconds"]
    parts = ("training", "evaluation", "checkpoints")
    assert seconds["total"] == pytest.approx(sum(seconds[part] for part in parts))
    assert seconds["total_between"][0] < seconds["total"] < seconds["total_between"][1]
    assert point["memory"]["precision"] == "bf16"
    assert point["memory"]["peak"] > point["memory"]["activations"] > 1e7
