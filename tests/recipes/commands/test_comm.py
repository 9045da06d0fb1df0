"""`largebatch comm tune` and `largebatch comm simulate`, as a user runs them."""

import json

import pytest
from PIL import Image

from largebatch.comm import Measurement, Plan, Rule, Topology, Tuned, candidates
from largebatch.comm.tuning.tune import fit_and_plan
from tests.recipes.commands.test_app import command, run

SIMULATE = ("comm", "simulate", "resnet50-b65536")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulated(*options):
    result = run(*SIMULATE, *options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_recipe_is_simulated_on_clusters_of_many_sizes(folder):
    result = run(*SIMULATE, "--gpu", "p40", "--gpus", "1024")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("resnet50, 128 images per GPU on p40: 587.2 ms without comm")
    assert "102.2 MB of gradients" in lines[0]
    assert any("100 Gbit/s ([S] Jia et al. 2018" in line for line in lines)
    assert any("relative to one GPU with 64 images each, 218 images/s" in line for line in lines)
    table = [line.split() for line in lines if line.strip()[:1].isdigit() and "%" in line]
    assert [row[0] for row in table] == ["8", "16", "32", "64", "128", "256", "512", "1,024"]
    assert list(folder.iterdir()) == []


def test_json_gives_the_source_of_every_number_and_the_range_of_an_efficiency():
    found = simulated("--gpu", "v100", "--gpus", "512")
    assert any("DeepLearningExamples" in line for line in found["inputs"])
    assert found["gradient_bytes"] == 25_557_032 * 4
    best = found["relative_to"]
    assert (best["gpus"], best["images"]) == (8, 256)
    for cluster in found["clusters"]:
        step, waiting = cluster["step_seconds"], cluster["waiting_seconds"]
        assert waiting > 0
        assert cluster["images_per_second"] == pytest.approx(128 * cluster["gpus"] / step)
        assert cluster["efficiency"] == pytest.approx(128 / step / best["per_gpu"])
        low, high = cluster["efficiency_between"]
        if cluster["gpus"] == 8:  # as many as were measured
            assert low == high == cluster["efficiency"]
        else:
            assert low < cluster["efficiency"] < high <= 1
        exposed = cluster["exposed_seconds"]
        assert step == pytest.approx(found["compute_seconds"] + waiting + exposed)
    assert found["nccl"]["inter_gbytes"] == pytest.approx(0.8 * 25)
    assert found["warnings"] == []
    for precision, width in {"auto": 4, "bf16": 4, "fp16-master": 2, "O2": 2}.items():
        found = simulated("--gpu", "p40", "--gpus", "8", f"precision={precision}")
        assert found["gradient_bytes"] == 25_557_032 * width, precision


def test_options_have_their_effects_on_a_cluster():
    def largest(*options):
        return simulated("--gpu", "a100", *options)["clusters"][-1]

    # Relative to the same few images, a small batch would be said to scale well.
    few = ("--gpus", "16", "--measured", "8x256:16621", "--images-per-gpu")
    assert largest(*few, "256")["efficiency"] == pytest.approx(0.98, abs=0.02)
    assert largest(*few, "32")["efficiency"] < 0.85
    many = ("--gpus", "256", "--images-per-gpu", "64")
    default, slow = largest(*many), largest(*many, "--bus-gbytes", "40")
    assert slow["exposed_seconds"] > default["exposed_seconds"]
    Plan((Rule("parameter-server"),), 4_000_000).save("mine.json")
    mine = largest(*many, "--plan", "mine.json")
    assert mine["step_seconds"] > default["step_seconds"]
    assert mine["buckets"] > default["buckets"]
    Plan((Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32"),)).save("mine.json")
    result = run(*SIMULATE, "--gpu", "a100", "--gpus", "16", "--plan", "mine.json", "--json")
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "error: sum_dtype: NCCL's model does not predict sums in fp32; valid" in result.output


def test_any_model_of_timm_is_simulated_with_its_own_times():
    """Neither t0 nor the rate of a preset for ResNet-50 matters."""
    found = simulated(
        *("model.name=vit_tiny_patch16_224", "--gpu", "a100", "--gpus", "16"),
        *("--measured", "64:31.5ms,256:98ms", "--images-per-gpu", "128"),
    )
    assert found["compute_seconds"] == pytest.approx((31.5 + 64 * (98 - 31.5) / 192) / 1e3)
    assert found["gradient_bytes"] == 5_717_416 * 4
    assert found["warnings"] == []
    outside = simulated("--gpu", "a100", "--gpus", "8", "--measured", "64:31.5ms,96:45ms")
    assert outside["warnings"][0].startswith("128 images per GPU are outside of 64 to 96")


def test_links_that_were_fitted():
    topology, sizes = Topology.of(8, 4), [4**k for k in range(5, 13)]
    timed = [
        Measurement(rule, size, (1e-4 + 1e-9 * size,))
        for size in sizes
        for rule in candidates(topology)
    ]
    fit_and_plan(timed, topology).save("plan.tuned.json")
    keys = ("--fitted", "plan.tuned.json", "--gpus", "16", "--gpus-per-node", "4")
    found = simulated(*keys, "--measured", "128:100")
    expected = Tuned.load("plan.tuned.json").links
    assert found["links"]["inter"]["seconds_per_byte"] == expected.inter.seconds_per_byte
    assert found["nccl"] is None


@pytest.mark.slow("measures on two processes")
def test_tune_writes_a_plan_that_the_trainer_takes(folder):
    result = command(
        *("comm", "tune", "--nproc", 2, "--ranks-per-node", 1, "--out", "plan.json"),
        *("--budget-seconds", 5, "--race-seconds", 6, "--wire", "bf16", "--sum-dtype", "fp32"),
        cwd=folder,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "comm.plan=plan.json" in result.stdout
    assert "race under a backward pass of " in result.stdout
    assert "ring, buckets of 25 MiB: " in result.stdout
    assert "links between nodes: " in result.stdout
    assert "cannot be fitted: no message crosses them on these ranks" in result.stdout
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["plan.json", "plan.png", "plan.tuned.json"]
    tuned = Tuned.load(folder / "plan.tuned.json")
    assert tuned.plan == Plan.load(folder / "plan.json") == tuned.final.plan
    dtypes = {(m.rule.wire_dtype, m.rule.sum_dtype) for m in tuned.measurements}
    assert dtypes == {(None, None), ("bf16", "fp32")}
    assert Image.open(folder / "plan.png").size[0] > 500
