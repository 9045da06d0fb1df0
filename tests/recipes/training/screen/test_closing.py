"""The end of a run: a golden text, the facts behind it, and commands that run as shown."""

import json
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from largebatch.recipes.commands.tree import app
from largebatch.recipes.errors import TrainingError
from largebatch.recipes.schema.load import load
from largebatch.recipes.train import main, train
from largebatch.recipes.training.callbacks import Callback
from largebatch.recipes.training.folder.outcome import Metrics
from largebatch.recipes.training.process import age_seconds
from largebatch.recipes.training.screen import closing
from largebatch.recipes.training.screen.closing import next_commands
from largebatch.recipes.training.trainer import Trainer
from largebatch.recipes.tune.learning_rate.search import Search
from tests.recipes.runs import BASE, JOB
from tests.recipes.training.screen.runs import SYNTHETIC, prepared

#: The folder of a run, which has a space.
RUN = "runs/a run"
DIVERGING = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.warmup=0", "epochs=6"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working folder, as commands are typed in one; no input is too slow here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(closing, "input_advice", lambda *_: [])
    return tmp_path


LINES = [
    {"split": split, "step": step, "epoch": step / 4, **values}
    for split, step, values in (
        ("train", 2, {"seconds": 1.0, "images_per_second": 1000.0}),
        ("val", 4, {"seconds": 10.0, "top1": None}),
        ("train", 4, {"seconds": 2.0, "images_per_second": 1300.0}),
        ("trust_ratio", 4, {}),
        ("val", 7, {"seconds": 20.0, "top1": 51.0}),
        ("train", 7, {"seconds": 4.0}),  # of the same steps, written after the evaluation
        ("train", 8, {"seconds": 8.0, "images_per_second": 1200.0}),
        ("val", 8, {"seconds": 40.0, "top1": 49.5}),
    )
]
SPENT = {"training": 60.0, "evaluation": 20.0, "checkpoints": 0.0, "start_up": 15.0, "rest": 5.0}
PHASES = {"input_seconds": 6.0, "forward_seconds": 18.0, "backward_seconds": 30.0}
TIMES = {"time_spent": {**SPENT, "total": 100.0}}
ADVICE = ["an image takes 9 ms to read", "threads: data.threads=3 instead of 1", "cores: 8"]


def test_closings(golden):
    run, _, _, said = prepared("digits", *SYNTHETIC, *BASE, f"run_dir={RUN}", "target_accuracy=50")
    (run.run_dir / "checkpoints").mkdir(parents=True)
    metrics = run.run_dir / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(one) + "\n" for one in LINES))
    shown = {}

    def close(title, status, run, step, phases=None, **further):
        clock = SimpleNamespace(facts=lambda: {**TIMES, "training_time": phases or {}})
        facts = closing.ending_facts(status, run, clock, step)
        paths = {"run folder": run.run_dir, "report": run.run_dir / "report.png"}
        closing.say(run, status, facts | further, paths)
        assert all(len(line) <= 100 or RUN in line for text in said for line in text.splitlines())
        shown[title] = "\n".join(said)
        said.clear()
        return facts

    total = run.timeline.total_steps
    facts = close("finished, images left out", "finished", run, total, PHASES, skipped_images=3)
    hit = {"accuracy": 50.0, "top1": 51.0, "step": 7, "epoch": 1.75, "seconds": 37.0}
    assert facts["target"] == hit
    lines = Metrics(tuple(LINES))
    assert closing._target(60.5, lines) is closing._target(None, lines) is None
    with metrics.open("a") as file:
        file.write(json.dumps({**LINES[-1], "top5": 90.0, "ema_top1": 52.0}) + "\n")
    close("finished, an average is better, and it waited for its data", "finished", run, total,
          input_advice=ADVICE)  # fmt: skip
    resnet9 = run.recipe.model.model_copy(update={"name": "resnet9"})
    ours = replace(run, recipe=run.recipe.model_copy(update={"model": resnet9}))
    assert "--to safetensors" in next_commands("finished", ours, facts)[1]
    close("stopped without a checkpoint", "stopped", run, 9)
    (run.run_dir / "checkpoints/step-00000006").mkdir()
    (run.run_dir / "checkpoints/step-00000006/state.json").touch()
    close("stopped after a checkpoint", "stopped", replace(run, step=6), 9)
    metrics.unlink()
    job = replace(run.job, world_size=2, local_world_size=2)
    close("diverged on two ranks", "diverged", replace(run, job=job), 9)
    recipe = run.recipe.model_copy(update={"target_accuracy": None})
    job = replace(job, world_size=16, local_world_size=8)
    close("ended early on two machines", "finished", replace(run, recipe=recipe, job=job), 9)
    golden("closing", shown)


# --- commands run as they are shown ---------------------------------------------------------


def run_command(command):
    program, *words = shlex.split(command)
    assert program == "largebatch"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


def content(name, folder=RUN):
    return json.loads(Path(folder, name).read_text())


class Stops(Callback):
    """Stops the run after its fifth step, by a signal or for a reason."""

    def __init__(self, reason):
        self._reason = reason

    def on_start(self, run):
        self._run = run

    def on_step_end(self, step):
        if step == 5:
            self._run.stop(self._reason) if self._reason else signal.raise_signal(signal.SIGTERM)


GOOD = "the loss is good enough"
#: By how a run ends: its keys, why a callback stops it, the step of its end, its warnings, the
#: kinds of commands, and the step at which one trains on.
ENDS = {
    "finished": ([], None, 7, [], "report export", None),
    "finished early": (["stop_after=3"], None, 3, [], "report train", 3),
    "stopped by a signal": (
        ["log_every=1"], "", 5,
        ["SIGTERM: the run stops with a checkpoint; ", "stopped by a signal at step 5; "],
        "train report", 5,
    ),
    "stopped after a checkpoint": (
        ["checkpoint.every=3"], GOOD, 5, [f"stopped at step 5: {GOOD}"], "train report", 3,
    ),
    "diverged": (DIVERGING, None, 2, [], "report tune", None),
}  # fmt: skip


@pytest.mark.slow("trains, and runs the commands that are shown")
@pytest.mark.parametrize("end", ENDS)
def test_commands_run_as_they_are_shown(photos, here, capsys, monkeypatch, end):
    keys, reason, step, warnings, kinds, from_step = ENDS[end]
    (here / "my photos").symlink_to(photos)
    loaded = load("digits", [*BASE, "data.path=my photos", f"run_dir={RUN}", *keys])
    callbacks = [] if reason is None else [Stops(reason)]
    with suppress(SystemExit, TrainingError):
        Trainer.of(loaded, JOB, callbacks=callbacks).run()
    out, err = capsys.readouterr()
    for line, warning in zip(err.splitlines(), warnings, strict=True):
        assert line.startswith(f"largebatch: warning: {warning}")
    status = end.partition(",")[0].split()[0]
    assert content("ending.json")["status"] == status
    facts = content("summary.json" if status == "finished" else "ending.json")
    assert facts["step"] == step
    spent = dict(facts["time_spent"])
    assert spent.pop("total") == pytest.approx(sum(spent.values()))
    assert out.endswith("\n  ".join(["\nnext:", *facts["next"]]) + "\n")
    assert [shlex.split(command)[1] for command in facts["next"]] == kinds.split()
    monkeypatch.setattr(Search, "_search", lambda search: sys.exit())  # its trials
    for command in facts["next"]:
        run_command(command)
    assert Path(RUN, "report.html").stat().st_size > 10_000
    assert "export" not in kinds or Path(RUN, "export/config.json").is_file()
    if "train" in kinds:
        summary = content("summary.json")
        found = summary["from_step"], summary["step"], summary["recipe"]
        assert found == (from_step, 7, "digits")


@pytest.mark.slow("trains in a new process")
def test_only_a_process_that_was_started_for_a_run_counts_its_age(photos, monkeypatch):
    assert 0 < age_seconds() < 1e6
    for module in ("train", "training.process"):
        monkeypatch.setattr(f"largebatch.recipes.{module}.age_seconds", lambda: 1e6)
    keys = [*BASE, f"data.path={photos}", "stop_after=1", "evaluate_every=null"]
    train(load("digits", [*keys, "run_dir=called"]), quiet=True)
    main(["digits", *keys, "run_dir=main", "--quiet"])
    run_command(shlex.join(["largebatch", "train", "digits", *keys, "run_dir=command"]))
    summaries = (Path(name, "summary.json") for name in ("called", "main", "command"))
    start_up = [json.loads(path.read_text())["time_spent"]["start_up"] for path in summaries]
    assert [seconds >= 1e6 for seconds in start_up] == [False, True, True]


@pytest.mark.slow("starts two processes twice")
def test_two_ranks_stopped_by_a_signal_are_resumed_as_shown(photos, monkeypatch):
    """The command in the output starts both ranks again, with the recipe as it was overridden."""
    words = ["digits", "--nproc", "2", *BASE, f"data.path={photos}", f"run_dir={RUN}", "epochs=200"]
    words += ["comm.algorithm=ring", "log_every=1", "evaluate_every=null"]
    program = [sys.executable, "-m", "largebatch.recipes"]
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[4] / 'src'}")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*program, "train", *words], **streams) as process:
        output = ""
        for line in process.stdout:
            output += line
            if re.search(r"\bstep +3 ", line):
                process.send_signal(signal.SIGUSR1)  # which torchrun must be told to pass on
    ending = content("ending.json")
    resume, step = ending["next"][0], ending["step"]
    assert output.count(f"\nnext:\n  {resume}\n") == 1, output  # of rank 0 alone
    resume = [*program, *shlex.split(resume)[1:], f"stop_after={step + 2}"]
    again = subprocess.run(resume, **streams)
    assert again.returncode == 0, again.stdout
    assert f"at step {step}\n" in again.stdout
    assert "x 2 ranks on one node" in again.stdout
    assert again.stdout.count("next:") == 1
    assert content("summary.json")["time_spent"]["start_up"] > 0
