"""`largebatch comm tune` and `largebatch comm simulate`, as a user runs them."""

import json

import pytest
from PIL import Image

from largebatch.comm import Measurement, Plan, Rule, Topology, Tuned
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
    result = run(*SIMULATE, "--gpu", "p40", "--gpus", "1024", "--out", "step.png")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("resnet50, 128 images per GPU on p40: 587.2 ms without comm")
    assert "102.2 MB of gradients" in lines[0]
    assert any("100 Gbit/s ([S] Jia et al. 2018" in line for line in lines)
    table = [line.split() for line in lines if line.strip()[:1].isdigit() and "%" in line]
    assert [row[0] for row in table] == ["8", "16", "32", "64", "128", "256", "512", "1,024"]
    assert lines[-1] == "step.png"
    assert Image.open(folder / "step.png").size[0] > 500


def test_json_gives_the_source_of_every_number():
    found = simulated("--gpu", "v100", "--gpus", "512")
    assert any("DeepLearningExamples" in line for line in found["inputs"])
    assert sum("us (" in line for line in found["inputs"]) == 2
    assert found["gradient_bytes"] == 25_557_032 * 4
    for cluster in found["clusters"]:
        step = cluster["planned"]["step_seconds"]
        waiting = cluster["planned"]["waiting_seconds"]
        assert waiting > 0
        assert cluster["planned"]["efficiency"] == pytest.approx(found["compute_seconds"] / step)
        assert cluster["images_per_second"] == pytest.approx(128 * cluster["gpus"] / step)
        exposed = cluster["planned"]["exposed_seconds"]
        assert step == pytest.approx(found["compute_seconds"] + waiting + exposed)
        assert step <= cluster["nccl"]["step_seconds"] * 1.02
    largest = found["clusters"][-1]
    assert largest["nccl"]["step_seconds"] < largest["unfused_ring"]["step_seconds"]
    assert found["nccl"]["inter_gbytes"] == pytest.approx(0.8 * 25)
    assert found["warnings"] == []


def test_any_model_of_timm_is_simulated_with_its_own_times():
    """The recipe's residual blocks do not matter, nor do t0 and rate of a preset for ResNet-50."""
    found = simulated(
        *("model.name=vit_tiny_patch16_224", "--gpu", "a100", "--gpus", "16"),
        *("--measured", "64:31.5,256:98", "--images-per-gpu", "128"),
    )
    assert found["compute_seconds"] == pytest.approx((31.5 + 64 * (98 - 31.5) / 192) / 1e3)
    assert found["gradient_bytes"] == 5_717_416 * 4
    assert found["warnings"] == []
    outside = simulated("--gpu", "a100", "--gpus", "8", "--measured", "64:31.5,96:45")
    assert outside["warnings"][0].startswith("128 images per GPU are outside of 64 to 96")


def test_a_slower_network_is_given_by_its_bus_bandwidth_or_its_oversubscription():
    common = ("--gpu", "a100", "--gpus", "256", "--images-per-gpu", "64")
    full = simulated(*common)["clusters"][-1]["nccl"]
    shared = simulated(*common, "--oversubscription", "4")
    slow = simulated(*common, "--bus-gbytes", "40")
    assert shared["nccl"]["oversubscription"] == 4
    assert slow["clusters"][-1]["nccl"] == pytest.approx(shared["clusters"][-1]["nccl"])
    assert slow["clusters"][-1]["nccl"]["exposed_seconds"] > full["exposed_seconds"]


def test_no_algorithm_of_single_messages_is_recommended_on_nccl():
    for cluster in simulated("--gpu", "h100", "--gpus", "1024")["clusters"]:
        algorithms = {rule["algorithm"] for rule in cluster["plan"]["rules"]}
        assert not algorithms & {"halving-doubling", "parameter-server"}


@pytest.mark.parametrize(
    ("precision", "width"), [("auto", 4), ("bf16", 4), ("fp16-master", 2), ("O2", 2)]
)
def test_gradients_are_as_wide_as_the_precision_has_them(precision, width):
    found = simulated("--gpu", "p40", "--gpus", "8", f"precision={precision}")
    assert found["gradient_bytes"] == 25_557_032 * width


def test_custom_links_and_gpus():
    own = ("--images-per-second", "500", "--intra-alpha-us", "1", "--intra-gbit", "400")
    found = simulated(
        *own, "--alpha-us", "20", "--gbit", "10", "--gpus", "32", "--gpus-per-node", "4"
    )
    links = found["links"]
    assert links["inter"] == pytest.approx({"latency_seconds": 20e-6, "seconds_per_byte": 0.8e-9})
    assert [c["gpus"] for c in found["clusters"]] == [8, 16, 32]
    assert found["compute_seconds"] == pytest.approx(128 / 500)
    slow = simulated(*own, "--links", "pcie3+eth10", "--gbit", "1", "--gpus", "32")
    assert slow["links"]["inter"]["seconds_per_byte"] == pytest.approx(8e-9)
    assert (
        slow["clusters"][-1]["planned"]["efficiency"]
        < found["clusters"][-1]["planned"]["efficiency"]
    )


def test_a_plan_an_algorithm_or_the_models_choice():
    Plan((Rule("hierarchical", 10_000_000), Rule("ring")), 4_000_000).save("mine.json")
    common = ("--gpu", "a100", "--gpus", "256")
    chosen = simulated(*common)["clusters"][-1]
    mine = simulated(*common, "--plan", "mine.json")["clusters"][-1]
    assert mine["plan"]["fusion_threshold_bytes"] == 4_000_000
    server = simulated(*common, "--algorithm", "parameter-server")["clusters"][-1]
    assert server["plan"]["rules"][0]["algorithm"] == "parameter-server"
    steps = [c["planned"]["step_seconds"] for c in (chosen, mine, server)]
    assert steps[0] <= min(steps) * 1.02
    assert steps[2] == max(steps)
    half = simulated(*common, "--wire", "fp16")["clusters"][-1]
    assert half["planned"]["communication_seconds"] < chosen["planned"]["communication_seconds"]


def test_a_plan_that_the_model_does_not_predict_is_refused_in_one_line():
    rule = Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32")
    Plan((rule,)).save("mine.json")
    result = run(*SIMULATE, "--gpu", "a100", "--gpus", "16", "--plan", "mine.json", "--json")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "error: sum_dtype: NCCL's model does not predict sums in fp32; valid" in result.output


def some_tuning(seconds=lambda rule, size: 1e-4 + 1e-9 * size):
    from largebatch.comm import candidates

    topology = Topology.of(8, 4)
    sizes = [4**k for k in range(5, 13)]
    return fit_and_plan(
        [
            Measurement(rule, size, (seconds(rule, size),))
            for size in sizes
            for rule in candidates(topology)
        ],
        topology,
    )


def test_links_that_were_fitted():
    some_tuning().save("plan.tuned.json")
    found = simulated(
        "--fitted",
        "plan.tuned.json",
        "--gpus",
        "16",
        "--gpus-per-node",
        "4",
        "--images-per-second",
        "100",
    )
    expected = Tuned.load("plan.tuned.json").links
    assert found["links"]["inter"]["seconds_per_byte"] == expected.inter.seconds_per_byte


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--images-per-second: missing; valid: the throughput of one GPU, or a preset by"),
        (("--gpu", "p4"), "--gpu: unknown GPU 'p4'; did you mean 'p40'?; valid: p40, p100"),
        (("--gpu", "p40", "--gpus", "1"), "--gpus: 1 needs no all-reduce; valid: 2 or more"),
        (
            ("--gpu", "p40", "--gpus", "100"),
            "--gpus: 100 GPUs do not fill nodes of 8; valid: a m",
        ),
        (("--gpu", "p40", "model.name=resnet18"), "of p40 is for resnet50 at 224 pixels only"),
        (("--gpu", "p40", "--links", "pcie3"), "--links: 'pcie3' has no known link"),
        (("--gpu", "p40", "--links", "pcie3+edrx"), "between nodes; did you mean 'edr'?"),
        (("--images-per-second", "9"), "--links: the links inside a node are unknown; valid: --l"),
        (("--gpu", "p40", "--gbit", "0"), "--links: the rate of a link cannot be 0.0 Gbit/s"),
        (
            ("--measured", "64:31.5"),
            "--measured: '64:31.5': no two steps; valid: images and mil",
        ),
        (("--measured", "64:9,64:9"), "--measured: '64:9,64:9': images: 64 twice; valid: images"),
        (
            ("--measured", "64:9,96:9", "--images-per-second", "9"),
            "--measured: given together with --images-per-second; valid: one of the two",
        ),
        (("--gpu", "p40", "--wire", "fp8"), "--wire: unknown dtype 'fp8'; valid: fp16, bf16"),
        (("--gpu", "p40", "--algorithm", "star"), "algorithm: unknown value 'star'; valid: ring"),
        (("--gpu", "p40", "--plan", "none.json"), "plan none.json: No such file"),
        (("--gpu", "p40", "--fitted", "none.json"), "--fitted: none.json: No such file"),
        (("--gpu", "p40", "--gpus", "16", "--out", "no/x.png"), "--out: cannot write no/x.png"),
        (("--gpu", "p40", "micro_batch_size=null"), "--images-per-gpu: missing, and the recipe"),
    ],
)
def test_a_mistake_is_reported_in_one_line(options, message, capsys):
    result = run(*SIMULATE, *options)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.slow("measures on two processes")
def test_tune_writes_a_plan_that_the_trainer_takes(folder):
    result = command(
        "comm",
        "tune",
        "--nproc",
        "2",
        "--ranks-per-node",
        "1",
        "--budget-seconds",
        "5",
        "--race-seconds",
        "6",
        "--wire",
        "bf16",
        "--sum-dtype",
        "fp32",
        "--out",
        "plan.json",
        cwd=folder,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "comm.plan=plan.json" in result.stdout
    assert "race under a backward pass of " in result.stdout
    assert "ring, buckets of 25 MiB: " in result.stdout
    assert "links between nodes: " in result.stdout
    assert "cannot be fitted: no message crosses them on these ranks" in result.stdout
    assert sorted(path.name for path in folder.iterdir()) == [
        "plan.json",
        "plan.png",
        "plan.tuned.json",
    ]
    tuned = Tuned.load(folder / "plan.tuned.json")
    assert tuned.plan == Plan.load(folder / "plan.json") == tuned.final.plan
    dtypes = {(m.rule.wire_dtype, m.rule.sum_dtype) for m in tuned.measurements}
    assert dtypes == {(None, None), ("bf16", "fp32")}
    assert Image.open(folder / "plan.png").size[0] > 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--nproc: missing; valid: a number of processes, or use torchrun"),
        (("--nproc", "2", "--wire", "fp8"), "--wire: unknown dtype 'fp8'; valid: fp16, bf16"),
        (
            ("--nproc", "2", "--wire", "fp16", "--sum-dtype", "fp64"),
            "--sum-dtype: unknown dtype 'fp64'; valid: fp32",
        ),
        (("--nproc", "2", "--sum-dtype", "fp32"), "--sum-dtype: nothing is sent in half precision"),
        (("--nproc", "2", "--out", "plan.txt"), "--out: cannot write a plan to plan.txt; valid"),
        (("--nproc", "2", "--recipe", "digits"), "--recipe: must be given together with --images"),
        *(
            (
                ("--nproc", "2", "--recipe", "digits", "--images-per-second", rate),
                "'--images-per-second'",
            )
            for rate in ("0", "-5")
        ),
    ],
)
def test_a_mistake_is_reported_before_anything_is_measured(options, message):
    result = run("comm", "tune", *options)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.slow("starts two processes")
def test_ranks_that_do_not_fill_nodes_are_reported_once(folder):
    result = command(
        "comm",
        "tune",
        "--nproc",
        "2",
        "--ranks-per-node",
        "3",
        "--budget-seconds",
        "5",
        cwd=folder,
        timeout=120,
    )
    assert result.returncode == 2
    assert (
        result.stderr.count("ranks_per_node: 2 ranks cannot be split into nodes of 3; valid: 1, 2")
        == 1
    )
