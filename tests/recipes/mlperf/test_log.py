"""MLPerf's log: MLCommons' own checker reads it, and recipes that break its rules are refused."""

import importlib.util
import json
import math
import signal
from pathlib import Path

import mlperf_logging
import pytest
import yaml
from mlperf_logging.compliance_checker.mlp_compliance import ComplianceChecker, is_integer

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.mlperf.rules import RULES, check_rules
from largebatch.recipes.schema.load import load
from tests.recipes.runs import make, train

pytestmark = pytest.mark.slow("trains small networks")

RULESET = "4.0.0"  # the last with ResNet-50

# The only rule that a run on small data cannot meet: the target accuracy on ImageNet.
NEEDS_IMAGENET = {"Failed checks for eval_accuracy : v['value'] >= 0.7590 and v['value'] < 1.0"}

# In addition to the values of digits.yaml. 27 updates; evaluated after 4.2 and 8 epochs.
KEPT = [
    "track=mlperf",
    "epochs=8",
    "micro_batch_size=8",
    "evaluate_every=4ep",
    "target_accuracy=75.9",
    "optimizer.lr=0.5",
]


def failures(path):
    """Return the failures that MLCommons' compliance checker finds, including parse errors."""
    checker = ComplianceChecker("training", RULESET, quiet=False, werror=True)
    checker.check_file(str(path), f"training_{RULESET}/common.yaml")
    return {*checker.overwritable.values(), *checker.not_overwritable}


def events(path):
    lines = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def values(path):
    return {event["key"]: event["value"] for event in events(path)}


def numbers(path, key, name="epoch_num"):
    return [event["metadata"][name] for event in events(path) if event["key"] == key]


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlperf") / "run"
    train(photos, folder, *KEPT)
    return folder


def test_the_checker_accepts_the_log_of_a_small_run_and_rejects_incomplete_ones(run, tmp_path):
    assert failures(run / "result_0.txt") == NEEDS_IMAGENET
    lines = (run / "result_0.txt").read_text().splitlines(keepends=True)
    for key in ("lars_epsilon", "init_stop", "global_batch_size", "eval_accuracy", "run_stop"):
        (tmp_path / key).write_text("".join(x for x in lines if f'"key": "{key}"' not in x))
        assert any(key in failure for failure in failures(tmp_path / key) - NEEDS_IMAGENET)


def test_a_run_that_reaches_the_target_passes_every_check(photos, tmp_path, monkeypatch):
    good = {"loss": 1.0, "top1": 76.0, "top5": 90.0}
    monkeypatch.setattr(
        "largebatch.recipes.training.trainer.evaluate", lambda *arguments: dict(good)
    )
    train(photos, tmp_path / "run", *KEPT)
    log = tmp_path / "run" / "result_0.txt"
    assert failures(log) == set()
    assert values(log)["eval_accuracy"] == 0.76
    assert numbers(log, "run_stop", "status") == ["success"]
    assert events(log)[-1]["key"] == "run_stop"


def test_the_log_has_the_values_of_the_recipe_and_the_run(run):
    found = values(run / "result_0.txt")
    assert found["submission_platform"].startswith("1x1 ")
    assert found["cache_clear"] is False
    assert (found["train_samples"], found["eval_samples"], found["seed"]) == (53, 23, 0)
    assert (found["global_batch_size"], found["gradient_accumulation_steps"]) == (16, 2)
    assert (found["model_bn_span"], found["opt_name"]) == (8, "lars")
    assert found["submission_org"] == "unstated"
    lars = {k.removeprefix("lars_"): v for k, v in found.items() if k.startswith("lars_")}
    assert lars == {
        "opt_base_learning_rate": 0.5,
        "opt_end_learning_rate": 1e-4,
        "opt_learning_rate_decay_poly_power": 2,
        "opt_learning_rate_decay_steps": round(8 * 53 / 16) - round(53 / 16),
        "opt_learning_rate_warmup_epochs": 1,
        "opt_momentum": 0.9,
        "opt_weight_decay": 1e-4,
        "epsilon": 0.0,
    }


def test_epochs_blocks_and_evaluations_are_logged_at_their_positions(run):
    log = run / "result_0.txt"
    metrics = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in metrics if line["split"] == "val"]
    assert [line["epoch"] for line in evaluated] == [4.2264, 7.8491]
    assert numbers(log, "eval_accuracy") == [4.226, 7.849]
    accuracies = [e["value"] for e in events(log) if e["key"] == "eval_accuracy"]
    assert accuracies == [pytest.approx(line["top1"] / 100) for line in evaluated]
    assert numbers(log, "block_start", "first_epoch_num") == [1, 5]
    assert numbers(log, "block_start", "epoch_count") == [4, 3.774]
    assert numbers(log, "epoch_start") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert numbers(log, "epoch_stop") == [1, 2, 3, 4, 5, 6, 7]  # 26 updates are 7.85 epochs
    assert numbers(log, "run_stop", "status") == ["aborted"]
    stamps = [event["time_ms"] for event in events(log)]
    assert stamps == sorted(stamps)


def test_a_run_that_stopped_is_marked_and_a_resumed_one_adds_nothing(photos, tmp_path, capsys):
    trainer = make(photos, tmp_path / "run", *KEPT, "checkpoint.every=2", "log_every=1")
    update = trainer._update

    def interrupted(*arguments):
        update(*arguments)
        if trainer.step == 4:
            signal.raise_signal(signal.SIGTERM)

    trainer._update = interrupted
    with pytest.raises(SystemExit):
        trainer.run()
    log = tmp_path / "run" / "result_0.txt"
    stopped = log.read_text()
    assert numbers(log, "run_stop", "status") == ["aborted"]
    # A killed run cannot log its end, so the resumed run logs it.
    log.write_text("".join(x for x in stopped.splitlines(True) if '"run_stop"' not in x))
    for _ in range(2):
        train(photos, tmp_path / "run", *KEPT, "resume=true", "stop_after=6")
        assert [e["key"] for e in events(log)] == [
            json.loads(x.removeprefix(":::MLLOG "))["key"] for x in stopped.splitlines()
        ]
        assert numbers(log, "run_stop", "status") == ["aborted"]
    assert "a resumed run cannot be submitted to the closed division" in capsys.readouterr().err


def test_a_run_restarted_before_its_first_checkpoint_has_a_new_log(photos, tmp_path, capsys):
    log = tmp_path / "run" / "result_0.txt"
    log.parent.mkdir()
    log.write_text("cut short")
    # As the reference points at batch 13,056, which count decay steps from the start of the run.
    keys = ["schedule.warmup=10", "schedule.decay=20", "schedule.decay_from=start"]
    keys += [*KEPT, "batch_norm.images=2", "stop_after=1"]
    with pytest.raises(RecipeError, match=r"track: .*result_0.txt already exists; valid: a new"):
        make(photos, tmp_path / "run", *keys)
    assert log.read_text() == "cut short"
    train(photos, tmp_path / "run", *keys, "resume=true")
    said = capsys.readouterr().err
    assert "mlperf: this run is not the benchmark: model test_resnet, not resnet50; " in said
    assert "training images 53, not 1,281,167; validation images 23" in said
    found = values(log)
    assert found["model_bn_span"] == 2
    assert found["lars_opt_learning_rate_decay_steps"] == 20
    assert found["lars_opt_learning_rate_warmup_epochs"] == round(10 / (53 / 16), 3)
    assert failures(log) - NEEDS_IMAGENET == set()
    assert (tmp_path / "run" / "result_0.txt.1").read_text() == "cut short"


def test_the_environment_names_the_submitter_and_the_system(photos, tmp_path, monkeypatch):
    given = {"SUBMISSION_ORG": "us", "SUBMISSION_PLATFORM": "a desk", "STATUS": "onprem"}
    for name, value in (given | {"CACHES_CLEARED": "1"}).items():
        monkeypatch.setenv(f"MLPERF_{name}", value)
    make(photos, tmp_path / "run", *KEPT)._start()
    found = values(tmp_path / "run" / "result_0.txt")
    names = [f"submission_{key}" for key in ("org", "platform", "status")]
    assert [found[name] for name in names] == [*given.values()]
    assert found["cache_clear"] is True
    monkeypatch.setenv("MLPERF_STATUS", "onpremise")
    with pytest.raises(RecipeError, match=r"MLPERF_STATUS: no availability 'onpremise'; valid: "):
        make(photos, tmp_path / "other", *KEPT)


def test_a_missing_library_is_reported_in_one_line(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"valid: pip install 'largebatch\[mlperf\]', or "):
        make(photos, tmp_path / "run", *KEPT)


BROKEN = {
    **{"optimizer.name": "sgd", "optimizer.args": "{eps: 1e-8}", "optimizer.weight_decay": 3e-4},
    **{"optimizer.trust_coefficient": 0.02, "optimizer.dialect": "torch"},
    **{"optimizer.bias_lr_scale": 0.5, "optimizer.body_lr_scale": 0.5},
    **{"optimizer.nesterov": "true", "optimizer.clip_grad_norm": 1.0},
    **{"optimizer.decay_bias_and_norm": "true", "optimizer.adapt_bias_and_norm": "true"},
    **{"schedule.name": "cosine", "schedule.power": 1, "schedule.end": 0, "schedule.start": 0.1},
    **{"schedule.warmup_shape": "quadratic", "label_smoothing": 0.2, "mixing.mixup": 0.2},
    **{"mixing.cutmix": 1, "loss.name": "binary-cross-entropy", "data.flip": "alternating"},
    **{"data.translate": 2, "init.from": "runs/other/weights.pt", "init.images": "5000"},
    **{"ema.decay": 0.99, "stages": "[{from: 1ep, image_size: 24}]", "target_accuracy": 70},
    "evaluate_every": "1ep",
}
OK = ["track=mlperf", "evaluate_every=4ep"]


def refused(key, value):
    recipe = load("resnet50-b65536", [*OK, f"{key}={value}"]).recipe
    with pytest.raises(RecipeError) as caught:
        check_rules(recipe)
    return str(caught.value)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_a_recipe_that_breaks_a_rule_is_refused_by_its_key(rule):
    message = refused(rule.key, BROKEN[rule.key])
    assert message.startswith(f"{rule.key}: ")
    assert f"; valid: {rule.valid}, or track without mlperf" in message


def test_momentum_is_unrestricted_from_batch_32768():
    check_rules(load("resnet50-b65536", OK).recipe)
    message = refused("batch_size", 8192)
    assert message.startswith("optimizer.momentum: 0.951807 breaks a rule")
    check_rules(load("resnet50-b65536", [*OK, "batch_size=8192", "optimizer.momentum=0.9"]).recipe)


CHECKED = {
    "optimizer.weight_decay": "lars_opt_weight_decay",
    "schedule.power": "lars_opt_learning_rate_decay_poly_power",
    "schedule.end": "lars_opt_end_learning_rate",
}


def test_rules_are_those_of_the_checkers_rule_file():
    folder = Path(mlperf_logging.__file__).parent / "compliance_checker" / f"training_{RULESET}"
    content = yaml.load((folder / "closed_resnet_lars.yaml").read_text(), yaml.BaseLoader)
    checks = {entry["KEY"]["NAME"]: entry["KEY"].get("CHECK", "True") for entry in content}
    by_args = {"lars_epsilon"}  # 0 where optimizer.args has implementation only
    assert {k for k, check in checks.items() if check != "True"} == {*CHECKED.values(), *by_args}
    for rule in (rule for rule in RULES if rule.key in CHECKED):
        for value in (0, 1e-8, 3e-4, 1.5, 2, 2.5, 4.0, *(1e-4 * 2.0**n for n in range(-12, 13))):
            names = {"v": {"value": value}, "is_integer": is_integer, "math": math}
            theirs = value > 0 and eval(checks[CHECKED[rule.key]].strip(), names)
            assert rule.allows(value) == theirs, (rule.key, value)
