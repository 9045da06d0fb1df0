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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "eight"), "--gpus: 'eight' is no list of numbers; valid: such as 64 or 8,64"),
        (("--gpus", "0"), "--gpus: 0 GPUs cannot train; valid: 1 or more"),
        (("--gpus", "48"), "--gpus: 48 does not divide batch_size 65536; valid: 32 or 64 GPUs"),
        (
            (*OWN, "--gpus", "16", "--gpus-per-node", "3"),
            "16 GPUs do not fill nodes of 3; valid: a mu",
        ),
        (("--gpu", "h10"), "--gpu: unknown GPU 'h10'; did you mean 'h100'?; valid: p40"),
        (("--gpu", "h100"), "the preset of h100 is for resnet50 at 224 pixels only; valid: the"),
        ((), "--measured: missing; valid: such as 256:2470 for 2,470 images/s of one GPU"),
        (
            ("--measured", "128:9"),
            "--links: missing; valid: INTRA+INTER, such as nvlink4+ndr-x8, or",
        ),
        ((*OWN, "batch_norm.ranks=3"), "batch_norm.ranks: 3 does not divide"),
        ((*OWN, "--fitted", "none.json"), "--fitted: given together with other options on links"),
        ((*OWN, "comm.plan=none.json"), "plan none.json: No such file"),
    ],
)
def test_a_mistake_is_reported_in_one_line(options, message):
    result = run(*PLAN, *options)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(monkeypatch):
    def load(recipe, overrides):
        raise AssertionError("the work has begun")

    monkeypatch.setattr("largebatch.recipes.schema.load.load", load)
    result = run("schedule", "resnet50-b65536", "--out", "picture.doc")
    assert result.exit_code == 2
    assert result.output == (
        "largebatch: error: --out: cannot write picture.doc; valid: a name with .png, .svg or "
        ".pdf\n"
    )
