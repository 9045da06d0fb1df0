"""The names of metrics; and trackers, with the real packages and no network, read back."""

import importlib.util
import json
import logging
import re
import socket
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.screen import closing
from tests.ranks import run_ranks
from tests.recipes.runs import make, refused, train
from tests.recipes.training.small import small_networks, small_trainer

SHORT = ["stop_after=4", "log_every=2", "evaluate_every=4", "checkpoint.every=null"]
MORE = ["ema.decay=0.9", "optimizer.clip_grad_norm=1", "precision=fp16", "loss_scale=128"]
TRUST = "trust_ratios_every=2"
ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
SEEN, ENDS = [], []  # of W&B: each call of log with its run; top1 in the summary, and exit code


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run folder with all trackers, stopped and resumed: importing MLflow takes seconds, and so
    does the making of its database."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    with pytest.MonkeyPatch.context() as patch, small_networks():
        for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "MLFLOW_TRACKING_URI"):
            patch.delenv(name, raising=False)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(closing, "write_picture", lambda run_dir, title: run_dir)
        log, finish = wandb.Run.log, wandb.Run.finish
        patch.setattr(wandb.Run, "log", lambda run, v: SEEN.append((run, v)) or log(run, v))

        def ends(run, exit_code):
            ENDS.append((run.summary.get("top1"), exit_code))
            finish(run, exit_code)

        patch.setattr(wandb.Run, "finish", ends)
        keys = [*SHORT, *MORE, TRUST, "track=[tensorboard,wandb,mlflow]"]
        small_trainer(folder, *keys, "stop_after=2", "evaluate_every=null").run()
        small_trainer(folder, *keys, "resume=true").run()
    return folder


@pytest.fixture(scope="module")
def lines(tracked):
    """The metrics that every tracker must hold: (split, name) -> [(step, value)]."""
    found = {}
    for line in read_metrics(tracked):
        if line["split"] in ("train", "val"):
            for name in line.keys() - {"split", "step", "epoch", "step_wait_seconds"}:
                values = found.setdefault(f"{line['split']}/{name}", [])
                values.append((line["step"], pytest.approx(line[name], rel=1e-5)))  # FP32
    some = {"train/loss", "train/loss_scale", "train/gradient_norm", "val/top5", "val/ema_top1"}
    assert some <= found.keys()
    assert [step for step, _ in found["train/loss"]] == [2, 4]
    return found


def test_tensorboard_holds_scalars_by_split_and_histograms(tracked, lines):
    events = EventAccumulator(str(tracked / "tensorboard"))
    events.Reload()
    found = {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in events.scalars.Keys()}
    assert [step for step, _ in found.pop("epoch")] == [2, 4, 4]
    assert found == lines
    assert "trust_ratio/0.weight" in events.Tags()["histograms"]


def test_wandb_gets_config_and_metrics_under_one_id(tracked, lines):
    runs = list({id(run): run for run, _ in SEEN}.values())
    assert len({run.id for run in runs}) == 1
    assert len(runs) == 2  # with the resumed one
    assert (runs[0].project, runs[0].name) == ("largebatch", "digits/run")
    assert runs[0].config["optimizer"]["name"] == "lars"
    found = {}
    for _, values in SEEN:
        for name in values.keys() - {"step", "epoch"}:
            found.setdefault(name, []).append((values["step"], values[name]))
    histograms = {name for name in found if name.startswith("trust_ratio/")}
    assert {name: found[name] for name in found.keys() - histograms} == lines
    assert "trust_ratio/0.weight" in histograms
    assert [(None, 0), (lines["val/top1"][-1][1], 0)] == ENDS


def test_mlflow_holds_parameters_and_metrics_of_one_run(tracked, lines):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tracked / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("largebatch")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits/run")
    # As they were when the run was first started.
    wanted = {"optimizer.name": "lars", "batch_size": "12", "stop_after": "2"}
    assert wanted.items() <= run.data.params.items()
    for name, values in lines.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in history] == values
    assert run.data.metrics["summary/top1"] == lines["val/top1"][-1][1]


@pytest.mark.slow("starts each tracker")
def test_ids_are_in_the_checkpoint_and_another_folder_is_another_run(small, tracked, monkeypatch):
    checkpoint, asked = tracked / "checkpoints/step-00000004", {}
    saved = json.loads((checkpoint / "state.json").read_text())["callbacks"]
    assert set(saved) == {"wandb", "mlflow"}

    def init(**options):
        asked.update(options)
        raise OSError("no network")

    monkeypatch.setattr("wandb.init", init)
    fork = tracked.parent / "fork"
    for folder, ours, found in (
        (tracked, "true", saved["wandb"]["id"]),
        (fork, f"{checkpoint}", None),
    ):
        keys = [*SHORT, "track=[wandb]", "stop_after=6", f"resume={ours}"]
        trainer = small_trainer(folder, *keys)
        assert "track: wandb cannot start: no network; valid: log" in refused(trainer.run)
        assert asked["id"] == found


def test_a_missing_package_is_one_line_with_the_command(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *package: None)
    for name, extra in (("tensorboard", "recipes"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        valid = f"pip install 'largebatch[{extra}]', or track without {name}"
        message = refused(make, photos, tmp_path / "run", f"track=[{name}]")
        assert message == f"track: {name} is not installed; valid: {valid}"
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_is_one_line(photos, tmp_path, monkeypatch):
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with socket.socket() as silent:  # it does not listen, so that connections are refused
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        message = refused(train, photos, tmp_path, *SHORT, "track=[mlflow]")
    assert f"track: mlflow cannot start at {url}: " in message


# --- the names of docs/guides/watch.md ----------------------------------------------------------

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "watch.md"
ROW = re.compile(r"^\| `(\w+)` \| (train|val|train, val) \|[^|]*\|[^|]+\|$", re.MULTILINE)

#: All that a recipe can ask to be measured, on two ranks.
EVERYTHING = [
    *("precision=fp16", "optimizer.clip_grad_norm=1", "gradient_noise_every=1", "ema.decay=0.9"),
    *("stages=[{from: 1ep, batch_size: 24, lr: keep}]", "trust_ratios_every=2", "track=[]"),
]
#: What a run on CPUs does not have.
ELSEWHERE = {"copy_seconds"}


@pytest.mark.slow("trains on two ranks in half precision")
def test_the_table_has_the_names_that_runs_write_and_no_other(photos, tmp_path):
    run_ranks(2, train, photos, tmp_path, *EVERYTHING)
    written = {}
    for line in read_metrics(tmp_path):
        if line["split"] != "trust_ratio":
            for name in line.keys() - {"split", "step", "epoch"}:
                written.setdefault(name, set()).add(line["split"])
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    table = {name: {*splits.split(", ")} for name, splits in rows}
    assert len(table) == len(rows)
    assert written == {name: table.get(name) for name in written}
    assert table.keys() - written.keys() <= ELSEWHERE
