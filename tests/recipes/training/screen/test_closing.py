"""The end of a run: a golden text, the facts behind it, and commands that run as shown."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from largebatch.pipeline import Remedy
from largebatch.recipes.commands.tree import app
from largebatch.recipes.errors import TrainingError
from largebatch.recipes.schema.catalogue import DATA_SETS, entries, promised_as_it_is
from largebatch.recipes.schema.load import load
from largebatch.recipes.train import main, train
from largebatch.recipes.training.callbacks import Callback
from largebatch.recipes.training.process import age_seconds
from largebatch.recipes.training.run_state import run_state
from largebatch.recipes.training.screen import closing
from largebatch.recipes.training.screen.closing import _target, ending_facts, say
from largebatch.recipes.training.screen.next_commands import next_commands, resume_command
from largebatch.recipes.training.trainer import Trainer
from tests.recipes.runs import BASE, JOB, make
from tests.recipes.training.screen.runs import SYNTHETIC, prepared

#: The folder of a run, which has a space.
RUN = "runs/a run"
DIVERGING = ["optimizer.name=sgd", "optimizer.lr=1e30", "optimizer.momentum=0", "schedule.warmup=0"]
THREADS = Remedy("threads: data.threads=3 instead of 1", {"data.threads": 3})
ON_GPU = Remedy("decoding on the GPU: data.backend=dali-gpu", {"data.backend": "dali-gpu"})
SMALLER = Remedy("smaller files: with 64 pixels", prepare=("--resize", "64"))
SHARDS = Remedy("shards: files are read one by one", prepare=("--format", "webdataset"))
CORES = Remedy("cores: each rank needs 8 to keep up with the model and has 2")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working folder, as commands are typed in one; no input is too slow here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(closing, "input_advice", lambda *_: ("", []))
    return tmp_path


# --- what is shown --------------------------------------------------------------------------


def line(split, step, seconds, **values):
    return {"split": split, "step": step, "epoch": step / 4, "seconds": seconds, **values}


LINES = [
    line("train", 2, 1.0),
    line("val", 4, 10.0, top1=None),
    line("train", 4, 2.0),
    {"split": "trust_ratio", "step": 4, "epoch": 1.0},
    line("val", 7, 20.0, top1=51.0),
    line("train", 7, 4.0),  # of the same steps, written after the evaluation
    line("train", 8, 8.0),
    line("val", 8, 40.0, top1=49.5),
]
SPENT = {"training": 60.0, "evaluation": 20.0, "checkpoints": 0.0, "start_up": 15.0, "rest": 5.0}
PHASES = {"input_seconds": 6.0, "forward_seconds": 18.0, "backward_seconds": 30.0}
TIMES = {"time_spent": {**SPENT, "total": 100.0}, "first_wait_seconds": 2.0}
SUMMARY = {"top5": 90.0, "images_per_second": 1234.5, "train_seconds": 61.0, "skipped_images": 3}


def test_closings(golden, monkeypatch):
    run, _, _, said = prepared("digits", *SYNTHETIC, *BASE, f"run_dir={RUN}", "target_accuracy=50")
    run.run_dir.mkdir(parents=True)
    metrics = run.run_dir / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(one) + "\n" for one in LINES))
    total = run.timeline.total_steps
    shown = {}

    def close(title, status, run, known, remedies=(), phases=None):
        clock = SimpleNamespace(facts=lambda: {**TIMES, "training_time": phases or {}})
        facts = ending_facts(status, run, clock, known, remedies)
        say(run, status, facts, {"run folder": run.run_dir, "report": run.run_dir / "report.png"})
        assert all(len(line) <= 100 or RUN in line for text in said for line in text.splitlines())
        shown[title] = "\n".join(said)
        said.clear()
        return facts

    known = {"step": total, **SUMMARY, "ema_top1": 52.0}
    promise = "76 % top-1 with {0.train:,} images of {0.classes} classes, on {0.val}"
    monkeypatch.setattr(closing, "promised_as_it_is", lambda *about: promise.format(about[-1]))
    facts = close("finished, with an average of the weights", "finished", run, known, [], PHASES)
    hit = {"accuracy": 50.0, "top1": 51.0, "step": 7, "epoch": 1.75, "seconds": 37.0}
    monkeypatch.setattr(closing, "promised_as_it_is", lambda *about: "")
    assert facts["target"] == hit == _target(50.0, LINES)
    assert _target(60.5, LINES) is _target(None, LINES) is None
    advice = ["an image takes 9 ms to read", THREADS.text, CORES.text]
    slow = {"step": total, "input_advice": advice}
    close("finished, and waited for its data", "finished", run, slow, [THREADS, CORES])
    close("stopped without a checkpoint", "stopped", run, {"step": 9})
    monkeypatch.setattr(closing, "newest_of", lambda folder: folder / "checkpoints/step-00000006")
    resumed = replace(run, step=6)
    close("stopped after a checkpoint", "stopped", resumed, {"step": 9})
    metrics.unlink()
    job = replace(run.job, world_size=2, local_world_size=2)
    close("diverged on two ranks", "diverged", replace(run, job=job), {"step": 9})
    recipe = run.recipe.model_copy(update={"target_accuracy": None})
    job = replace(job, world_size=16, local_world_size=8)
    close(
        "ended early on two machines", "finished", replace(run, recipe=recipe, job=job), {"step": 9}
    )
    golden("closing", shown)


def test_what_a_recipe_promises_is_shown_where_it_runs_as_it_is():
    recipe, images = load("digits").recipe, DATA_SETS["data/digits"]
    text = promised_as_it_is("digits", recipe, images)
    assert text.startswith("99.4 to 99.7 % top-1 on the 360 held-out images")
    elsewhere = ["data.path=/elsewhere", "run_dir=x", "precision=bf16", "data.threads=3"]
    elsewhere += ["data.source=webdataset", "data.backend=torchvision", "data.prefetch=4"]
    assert promised_as_it_is("digits", load("digits", elsewhere).recipe, images) == text
    synthetic = ["data.source=synthetic", "data.path=null"]
    for keys in (
        *(["epochs=3"], ["optimizer.lr=2"], ["stop_after=1ep"], ["model.name=resnet18"], synthetic),
        *(["target_accuracy=50"], ["data.image_size=16"], ["data.holdout=100"], ["data.flip=1"]),
    ):
        assert promised_as_it_is("digits", load("digits", keys).recipe, images) == "", keys
    for other in (images._replace(**{field: 9}) for field in images._fields):
        assert promised_as_it_is("digits", recipe, other) == ""
    assert promised_as_it_is("my-own", recipe, images) == ""


def test_the_data_sets_of_all_recipes_are_known():
    for entry in entries():
        data = entry.recipe.data
        assert DATA_SETS[data.path].train == data.train_images, entry.name


# --- the commands ---------------------------------------------------------------------------


def test_the_better_weights_are_exported_in_a_form_that_the_model_has(here):
    run, *_ = prepared("digits", *SYNTHETIC, *BASE)
    done = {"step": 7, "total_steps": 7, "top1": 50.0}
    *_, export = next_commands("finished", run, {**done, "ema_top1": 49.0})
    assert export.endswith(" --to timm --out export")
    (here / "export").mkdir()  # a second export would not find its folder free
    *_, export = next_commands("finished", run, {**done, "ema_top1": 51.0})
    assert export.endswith(" --to timm --out export-2 --ema")
    own = run.recipe.model.model_copy(update={"name": "resnet9"})
    run = replace(run, recipe=run.recipe.model_copy(update={"model": own}))
    assert "--to safetensors" in next_commands("finished", run, done)[1]
    assert next_commands("failed", run, done) == []


@pytest.mark.parametrize("name", ["a #b", "null", "2024", "runs/2: a", "[x]"])
def test_commands_name_the_folder_of_the_run_whatever_it_is_called(name):
    run, *_ = prepared("digits", *SYNTHETIC, *BASE, "run_dir=run")
    run = replace(run, run_dir=Path(name))
    words = shlex.split(resume_command(run))
    assert words[:3] == ["largebatch", "train", f"{name}/recipe.yaml"]
    assert load("digits", words[3:-1]).recipe.run_dir == name
    Path(name).mkdir(parents=True)
    done = {"step": 7, "total_steps": 7}
    *_, place = shlex.split(next_commands("finished", run, done, [THREADS])[1])
    assert load("digits", [place]).recipe.run_dir == f"{name}-2"  # not into the run's own


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        (["--rdzv-endpoint", "node-7:1234"], {}, "node-7:1234"),
        (["--rdzv_endpoint=node-7"], {"PET_RDZV_ENDPOINT": "other:1"}, "node-7"),
        ([], {"PET_RDZV_ENDPOINT": "node-8:99"}, "node-8:99"),
        (["--nnodes", "2"], {"MASTER_ADDR": "node-9", "MASTER_PORT": "5"}, "node-9:5"),
        ([], {}, "HOST:29500"),
    ],
)
def test_a_run_on_several_machines_is_resumed_at_the_end_point_that_it_had(
    monkeypatch, given, environment, found
):
    """The options of torchrun, which started this process, are those of a process made here."""
    program = [sys.executable, "-c", "print(flush=True); input()", *given]
    for name in ("PET_RDZV_ENDPOINT", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run, *_ = prepared("digits", *SYNTHETIC, *BASE)
    run = replace(run, job=replace(run.job, world_size=16, local_world_size=8))
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()  # it is that program by now
        monkeypatch.setattr("largebatch.recipes.launcher._LAUNCHER", launcher.pid)
        words = shlex.split(resume_command(run))
    assert words[words.index("--rdzv-endpoint") + 1] == found


def run_command(command):
    """Run a command as it is shown, in this process."""
    program, *words = shlex.split(command)
    assert program == "largebatch"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


@pytest.mark.slow("trains and writes shards")
@pytest.mark.parametrize(
    ("remedies", "command"),
    [
        ([THREADS], "largebatch train '{run}/recipe.yaml' data.threads=3"),
        ([ON_GPU, THREADS, SHARDS], None),
        ([SMALLER], "{prepare} --format webdataset --resize 64 --out '{data}-shards'"),
        ([SHARDS, CORES], "{prepare} --format webdataset --out '{data}-shards'"),
    ],
)
def test_a_run_that_waited_for_its_data_names_the_remedy(photos, here, remedies, command):
    data = here / "my photos"
    shutil.copytree(photos, data)
    keys = [*BASE, f"data.path={data}", "epochs=1", "schedule.warmup=0"]
    run, *_ = prepared("digits", *keys)
    run = replace(run, run_dir=Path(RUN))
    done = {"step": 3, "total_steps": 3}
    found = next_commands("finished", run, done, remedies)[1]
    if command is None:
        assert found.endswith("/recipe.yaml' data.backend=dali-gpu data.threads=3")
        return
    prepare = f"largebatch data prepare folder --source '{data}'"
    assert found == command.format(run=RUN, data=data, prepare=prepare)
    if "prepare" not in command:
        make(data, RUN, "epochs=1", "schedule.warmup=0", "stop_after=1").run()
        found += " run_dir=runs/faster"
    run_command(found)


# --- runs -----------------------------------------------------------------------------------


def shown(output):
    """The lines of the end, and the commands after them."""
    lines = output.splitlines()
    start = lines.index("next:")
    commands = [line.strip() for line in lines[start + 1 :] if line.startswith("  ")]
    return lines[:start], commands


def content(name):
    return json.loads(Path(RUN, name).read_text())


def stopped_at(trainer, step):
    """Send a signal to a run during a step."""
    original = trainer._update

    def update(*arguments):
        original(*arguments)
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._update = update
    with pytest.raises(SystemExit):
        trainer.run()


def test_a_finished_run_says_what_is_in_its_summary(photos, capsys):
    make(photos, RUN, "target_accuracy=1", "evaluate_every=1ep", "epochs=2", "log_every=3").run()
    lines, commands = shown(capsys.readouterr().out)
    assert not any("the recipe says" in line for line in lines)  # this is another network
    summary = content("summary.json")
    assert summary["next"] == commands
    spent = dict(summary["time_spent"])
    assert spent.pop("total") == pytest.approx(sum(spent.values()))
    assert min(spent.values()) > 0
    for command in commands:
        run_command(command)
    assert Path("report.html").stat().st_size > 10_000
    assert Path("export/config.json").is_file()


@pytest.mark.slow("trains and resumes")
def test_a_run_that_ended_early_by_its_recipe_is_continued(photos, capsys):
    make(photos, RUN, "stop_after=3").run()
    _, (_, go_on) = shown(capsys.readouterr().out)
    run_command(go_on)
    summary = content("summary.json")
    assert (summary["step"], summary["recipe"], summary["from_step"]) == (7, "digits", 3)
    assert run_state(Path(RUN)).recipe == load(f"{RUN}/recipe.yaml").name == "digits"


@pytest.mark.slow("trains, some in new processes")
def test_a_run_stopped_by_a_signal_names_the_command_that_resumes_it(photos, capsys):
    stopped_at(make(photos, RUN, "epochs=8", "log_every=1"), 4)
    out, err = capsys.readouterr()
    lines, commands = shown(out)
    received, stopped = err.splitlines()
    assert received.startswith("largebatch: warning: SIGTERM: the run stops with a checkpoint; ")
    assert stopped.startswith("largebatch: warning: stopped by a signal at step 5; ")
    assert not any(line.startswith("  checkpoint ") for line in lines)  # it is of this step
    ending = content("ending.json")
    assert (ending["status"], ending["step"], ending["total_steps"]) == ("stopped", 5, 26)
    assert ending["next"] == commands
    resume, report = commands
    run_command(report)
    output = run_command(resume)
    assert f"resumed from {RUN}/checkpoints/step-00000005 at step 5" in output
    assert "\nwhere the time went since step 5" in output
    assert (content("summary.json")["step"], content("ending.json")["status"]) == (26, "finished")


class Stops(Callback):
    """Stops the run after its fifth step."""

    def on_start(self, run):
        self._run = run

    def on_step_end(self, step):
        if step == 5:
            self._run.stop("the loss is good enough")


@pytest.mark.slow("trains, some in new processes")
@pytest.mark.parametrize(("every", "saved"), [("null", None), ("3", 3)])
def test_a_run_that_a_callback_stopped_is_resumed_only_from_a_checkpoint(
    photos, capsys, every, saved
):
    keys = [*BASE, f"data.path={photos}", f"run_dir={RUN}", f"checkpoint.every={every}"]
    Trainer(load("digits", [*keys, "log_every=1", "stop_after=6"]), JOB, callbacks=[Stops()]).run()
    out, err = capsys.readouterr()
    assert err == "largebatch: warning: stopped at step 5: the loss is good enough\n"
    _, commands = shown(out)
    ending = content("ending.json")
    assert (ending["checkpoint_step"], ending["next"]) == (saved, commands)
    assert len(commands) == (2 if saved else 1)
    if saved:
        assert "at step 3" in run_command(commands[0])
        assert content("summary.json")["step"] == 6


@pytest.mark.slow("trains, some in new processes")
def test_a_run_that_diverged_names_commands_to_find_a_rate(photos, capsys):
    with pytest.raises(TrainingError, match="training diverged"):
        make(photos, RUN, *DIVERGING, "epochs=6").run()
    lines, (report, tune) = shown(capsys.readouterr().out)
    assert any(line.startswith("digits, seed 0: diverged at step ") for line in lines)
    assert content("ending.json")["next"] == [report, tune]
    run_command(report)
    assert "learning rate" in run_command(tune + " --lr 0.01..1e4 --steps 20")


def test_errors_of_other_kinds_say_nothing_of_it(photos, capsys, monkeypatch):
    trainer = make(photos, RUN)
    monkeypatch.setattr(trainer, "_update", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert "next:" not in capsys.readouterr().out
    assert content("ending.json").keys() == {"status", "reason", "time"}


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
def test_two_ranks_stopped_by_a_signal_are_resumed_as_shown(photos):
    """The command in the output starts both ranks again, with the recipe as it was overridden."""
    words = ["digits", "--nproc", "2", *BASE, f"data.path={photos}", f"run_dir={RUN}", "epochs=200"]
    words += ["comm.algorithm=ring", "log_every=1", "evaluate_every=null"]
    program = [sys.executable, "-m", "largebatch.recipes.commands.app"]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[4] / 'src'}"}
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*program, "train", *words], env=environment, **streams) as process:
        output = ""
        for line in process.stdout:
            output += line
            if re.search(r"\bstep +3 ", line):
                process.send_signal(signal.SIGUSR1)  # which torchrun must be told to pass on
    assert "next:" in output, output
    _, (resume, _) = shown(output)
    assert " --nproc 2 " in resume
    step = content("ending.json")["step"]
    resume = [*program, *shlex.split(resume)[1:], f"stop_after={step + 2}"]
    again = subprocess.run(resume, env=environment, **streams)
    assert again.returncode == 0, again.stdout
    assert f"at step {step}\n" in again.stdout
    assert "x 2 ranks on one node" in again.stdout
    assert again.stdout.count("next:") == 1
    assert content("summary.json")["time_spent"]["start_up"] > 0
