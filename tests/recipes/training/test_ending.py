"""The end of a run: what was reached, where the time went, and commands that run as shown."""

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

import pytest
from typer.testing import CliRunner

from largebatch.recipes.commands.tree import app
from largebatch.recipes.errors import TrainingError
from largebatch.recipes.schema.load import load
from largebatch.recipes.train import main, train
from largebatch.recipes.training.callbacks import Callback
from largebatch.recipes.training.folder.outcome import outcome_of
from largebatch.recipes.training.metrics import read_metrics
from largebatch.recipes.training.next_commands import next_commands, resume_command
from largebatch.recipes.training.trainer import Trainer
from tests.recipes.runs import BASE, JOB, make

#: A class of its own for each run, whose folder has a space.
RUN = "runs/a run"
SHARDS = "largebatch data prepare folder --source {data} --format webdataset --out {data}-shards"
DIVERGING = ["optimizer.name=sgd", "optimizer.lr=1e30", "optimizer.momentum=0", "schedule.warmup=0"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, as commands are typed in one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_advice(monkeypatch):
    """The machine's speed decides whether a run has advice about its input."""
    monkeypatch.setattr("largebatch.recipes.training.results.input_advice", lambda *_: [])


def shown(output):
    """The lines of the end by their label, and the commands."""
    lines = output.splitlines()
    start = lines.index("next:")
    commands = [line.strip() for line in lines[start + 1 : start + 3]]
    assert all(line.startswith("  ") for line in lines[start + 1 : start + 3])
    return lines[:start], commands


def run_command(command):
    """Run a command as it is shown, in this process."""
    program, *words = shlex.split(command)
    assert program == "largebatch"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


def summary_of(folder):
    return json.loads(Path(folder, "summary.json").read_text())


def ending_of(folder):
    return json.loads(Path(folder, "ending.json").read_text())


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


def test_a_finished_run_says_what_it_reached_and_what_to_do(photos, here, capsys):
    make(photos, RUN, "target_accuracy=1", "evaluate_every=1ep", "epochs=2", "log_every=3").run()
    lines, commands = shown(capsys.readouterr().out)
    summary = summary_of(RUN)
    title = next(
        i for i, line in enumerate(lines) if line.startswith("digits, seed 0: finished at")
    )
    text = "\n".join(lines[title:])
    assert (
        f"\n  top-1            {summary['top1']:.2f} % (best {summary['best_top1']:.2f} %" in text
    )
    hit = summary["target"]
    val = next(line for line in read_metrics(Path(RUN)) if line["split"] == "val")
    assert (hit["step"], hit["top1"], hit["accuracy"]) == (val["step"], val["top1"], 1)
    lines_before = [line for line in read_metrics(Path(RUN)) if line["step"] <= val["step"]]
    assert lines_before[-1]["split"] == "train"  # the reading is written after the evaluation
    assert hit["seconds"] == pytest.approx(sum(line["seconds"] for line in lines_before), abs=0.01)
    assert f"\n  target           1 % reached at step {hit['step']}, epoch " in text
    assert "the recipe says" not in text  # this is another network
    spent = dict(summary["time_spent"])
    assert spent.pop("total") == pytest.approx(sum(spent.values()))
    train = [line for line in read_metrics(Path(RUN)) if line["split"] == "train"]
    assert min(spent.values()) > 0
    assert summary["training_time"]["input_seconds"] == pytest.approx(
        sum(line["input_seconds"] for line in train), abs=0.01
    )
    assert "\nwhere the time went " in text
    assert all(len(line) <= 100 for line in lines[title:] if RUN not in line and "run" not in line)
    assert summary["next"] == commands
    report, export = commands
    assert report == "largebatch report 'runs/a run' --out report.html"
    assert export == "largebatch export 'runs/a run' --to timm --out export"
    for command in commands:
        run_command(command)
    assert Path("report.html").stat().st_size > 10_000
    assert Path("export/config.json").is_file()
    # A second export would not find its folder free.
    again = make(photos, "runs/b", "epochs=1", "ema.decay=0.5")

    found = next_commands("finished", again.context, {"step": 4, "total_steps": 4})
    assert found[1] == "largebatch export runs/b --to timm --out export-2"


def test_the_better_weights_are_exported_in_a_form_that_the_model_has(photos, here):
    run = make(photos, "run", "ema.decay=0.5").context
    done = {"step": 7, "total_steps": 7, "top1": 50.0}
    assert next_commands("finished", run, {**done, "ema_top1": 51.0})[1].endswith("--ema")
    assert not next_commands("finished", run, {**done, "ema_top1": 49.0})[1].endswith("--ema")
    own = run.recipe.model_copy(
        update={"model": run.recipe.model.model_copy(update={"name": "resnet9"})}
    )
    assert "--to safetensors" in next_commands("finished", replace(run, recipe=own), done)[1]


@pytest.mark.slow("trains and resumes")
def test_a_run_that_ended_early_by_its_recipe_is_continued(photos, here, capsys):
    make(photos, RUN, "stop_after=3").run()
    _, (_, go_on) = shown(capsys.readouterr().out)
    assert go_on == (
        "largebatch train 'runs/a run/recipe.yaml' stop_after=null 'run_dir=runs/a run' --resume"
    )
    run_command(go_on)
    summary = summary_of(RUN)
    assert (summary["step"], summary["recipe"], summary["from_step"]) == (7, "digits", 3)
    assert outcome_of(Path(RUN)).recipe == "digits"


@pytest.mark.slow("trains, some in new processes")
def test_a_run_stopped_by_a_signal_names_the_command_that_resumes_it(photos, here, capsys):
    stopped_at(make(photos, RUN, "epochs=8", "log_every=1"), 4)
    out, err = capsys.readouterr()
    lines, (resume, report) = shown(out)
    warning = "stopped by a signal at step 5; resume=true continues from there"
    received, stopped = err.splitlines()
    assert received.startswith("largebatch: warning: SIGTERM: the run stops with a checkpoint; ")
    assert stopped == f"largebatch: warning: {warning}"
    assert "digits, seed 0: stopped at step 5 of 26, epoch 1.5" in lines
    assert not any(line.startswith("  checkpoint ") for line in lines)  # it is of this step
    assert any(line.startswith("where the time went ") for line in lines)
    assert resume == "largebatch train 'runs/a run/recipe.yaml' 'run_dir=runs/a run' --resume"
    ending = ending_of(RUN)
    assert (ending["status"], ending["step"], ending["total_steps"]) == ("stopped", 5, 26)
    assert ending["next"] == [resume, report]
    spent = ending["time_spent"]
    assert spent["total"] == pytest.approx(sum(spent.values()) / 2)
    run_command(report)
    output = run_command(resume)
    assert f"resumed from {RUN}/checkpoints/step-00000005 at step 5" in output
    assert "\nwhere the time went since step 5" in output
    assert (summary_of(RUN)["step"], ending_of(RUN)["status"]) == (26, "finished")


class Stops(Callback):
    """Stops the run after its fifth step."""

    def on_start(self, run):
        self._run = run

    def on_step_end(self, step):
        if step == 5:
            self._run.stop("the loss is good enough")


@pytest.mark.slow("trains, some in new processes")
@pytest.mark.parametrize("every", ["null", "3"])
def test_a_run_that_a_callback_stopped_is_resumed_only_from_a_checkpoint(
    photos, here, capsys, every
):
    keys = [*BASE, f"data.path={photos}", f"run_dir={RUN}", f"checkpoint.every={every}"]
    Trainer(load("digits", [*keys, "log_every=1", "stop_after=6"]), JOB, callbacks=[Stops()]).run()
    out, err = capsys.readouterr()
    assert err == "largebatch: warning: stopped at step 5: the loss is good enough\n"
    lines = out.splitlines()
    assert "digits, seed 0: stopped at step 5 of 7, epoch 1.5" in lines
    next_lines = lines[lines.index("next:") + 1 :]
    ending = ending_of(RUN)
    assert [line.strip() for line in next_lines] == ending["next"]
    report = "largebatch report 'runs/a run' --out report.html"
    if every == "null":
        assert "  checkpoint       none yet" in lines
        assert (ending["checkpoint_step"], ending["next"]) == (None, [report])
        return
    assert "  checkpoint       of step 3, from which the run resumes" in lines
    resume = "largebatch train 'runs/a run/recipe.yaml' 'run_dir=runs/a run' --resume"
    assert (ending["checkpoint_step"], ending["next"]) == (3, [resume, report])
    assert "at step 3" in run_command(resume)
    assert summary_of(RUN)["step"] == 6


@pytest.mark.slow("trains, some in new processes")
def test_a_run_that_diverged_names_commands_to_find_a_rate(photos, here, capsys):
    with pytest.raises(TrainingError, match="training diverged"):
        make(photos, RUN, *DIVERGING, "epochs=6").run()
    lines, (report, tune) = shown(capsys.readouterr().out)
    assert any(line.startswith("digits, seed 0: diverged at step ") for line in lines)
    assert tune == "largebatch tune lr 'runs/a run/recipe.yaml' --range"
    assert ending_of(RUN)["next"] == [report, tune]
    run_command(report)
    output = run_command(tune + " --lr 0.01..1e4 --steps 20")
    assert "learning rate" in output


def test_errors_of_other_kinds_end_as_before(photos, here, capsys, monkeypatch):
    trainer = make(photos, RUN)
    monkeypatch.setattr(trainer, "_update", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert "next:" not in capsys.readouterr().out
    assert ending_of(RUN).keys() == {"status", "reason", "time"}


@pytest.mark.slow("trains, some in new processes")
@pytest.mark.parametrize(
    ("hints", "command"),
    [
        (["threads: data.threads=3 instead of 1"], "largebatch train {recipe} data.threads=3"),
        (
            ["decoding on the GPU: data.backend=dali-gpu", "threads: data.threads=2 instead of 1"],
            "largebatch train {recipe} data.backend=dali-gpu data.threads=2",
        ),
        (
            ["smaller files: use largebatch data prepare folder --resize 64"],
            f"{SHARDS} --resize 64",
        ),
        (
            ["shards: pack them with largebatch data prepare folder --format webdataset, or use"],
            SHARDS,
        ),
        (["cores: each rank needs 8 to keep up with the model and has 2"], None),
    ],
)
def test_a_run_that_waited_for_its_data_names_the_remedy(photos, here, hints, command):
    data = here / "my photos"
    shutil.copytree(photos, data)
    make(data, RUN, "epochs=1", "schedule.warmup=0").run()
    run = make(data, "unused", "epochs=1", "schedule.warmup=0").context
    run = replace(run, run_dir=Path(RUN), recipe=run.recipe.model_copy(update={"run_dir": None}))
    summary = {"step": 3, "total_steps": 3, "input_advice": ["an image takes 9 ms", *hints]}
    found = next_commands("finished", run, summary)[1]
    if command is None:
        assert found.startswith("largebatch export ")
        return
    quoted = {"recipe": shlex.quote(f"{RUN}/recipe.yaml"), "data": str(data)}
    words = shlex.split(command.format(recipe=quoted["recipe"], data="DATA"))
    assert shlex.split(found) == [word.replace("DATA", str(data)) for word in words]
    if "dali-gpu" not in found:
        extra = " 'run_dir=runs/faster'" if found.startswith("largebatch train") else ""
        run_command(found + extra)


@pytest.mark.parametrize("name", ["a #b", "null", "2024", "runs/2: a", "[x]"])
def test_commands_name_the_folder_of_the_run_whatever_it_is_called(photos, here, name):
    run = make(photos, "run").context
    run = replace(run, run_dir=Path(name))
    words = shlex.split(resume_command(run))
    assert words[:3] == ["largebatch", "train", f"{name}/recipe.yaml"]
    assert load("digits", words[3:-1]).recipe.run_dir == name
    Path(name).mkdir(parents=True)
    summary = {"step": 7, "total_steps": 7, "input_advice": ["times", "data.threads=2"]}
    *_, place = shlex.split(next_commands("finished", run, summary)[1])
    assert load("digits", [place]).recipe.run_dir == f"{name}-2"


def test_the_remedy_does_not_write_into_the_folder_of_the_run(photos, here):
    run = make(photos, RUN).context
    Path(RUN).mkdir(parents=True)
    summary = {"step": 7, "total_steps": 7, "input_advice": ["times", "data.threads=2"]}
    assert "'run_dir=runs/a run-2'" in next_commands("finished", run, summary)[1]


def test_a_run_on_several_machines_is_resumed_by_torchrun(photos, here, monkeypatch):
    run = make(photos, RUN).context
    run = replace(run, job=replace(run.job, world_size=16, local_world_size=8))
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    assert resume_command(run) == (
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-0:29500 "
        "-m largebatch.recipes.train 'runs/a run/recipe.yaml' 'run_dir=runs/a run' resume=true"
    )


@pytest.mark.slow("trains in a new process")
def test_only_a_process_that_was_started_for_a_run_counts_its_age(photos, here, monkeypatch):
    for module in ("train", "training.process"):
        monkeypatch.setattr(f"largebatch.recipes.{module}.age_seconds", lambda: 1e6)
    keys = [*BASE, f"data.path={photos}", "stop_after=1", "evaluate_every=null"]
    train(load("digits", [*keys, "run_dir=called"]), quiet=True)
    main(["digits", *keys, "run_dir=main", "--quiet"])
    run_command(shlex.join(["largebatch", "train", "digits", *keys, "run_dir=command"]))
    start_up = [
        summary_of(name)["time_spent"]["start_up"] for name in ("called", "main", "command")
    ]
    assert [seconds >= 1e6 for seconds in start_up] == [False, True, True]


@pytest.mark.slow("starts two processes twice")
def test_two_ranks_stopped_by_a_signal_are_resumed_as_shown(photos, here):
    """The command in the output starts both ranks again, with the recipe as it was overridden."""
    words = ["digits", "--nproc", "2", *BASE, f"data.path={photos}", f"run_dir={RUN}", "epochs=200"]
    words += ["comm.algorithm=ring", "log_every=1", "evaluate_every=null"]
    program = [sys.executable, "-m", "largebatch.recipes.commands.app"]
    places = f"{Path(__file__).parents[3] / 'src'}"
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    environment["PYTHONUNBUFFERED"] = "1"
    with subprocess.Popen(
        [*program, "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        output = ""
        for line in process.stdout:
            output += line
            if re.search(r"\bstep +3 ", line):
                process.send_signal(signal.SIGUSR1)  # which torchrun must be told to pass on
    assert "next:" in output, output
    lines, (resume, _) = shown(output)
    assert resume == (
        "largebatch train 'runs/a run/recipe.yaml' 'run_dir=runs/a run' --nproc 2 --resume"
    )
    assert sum(line.startswith("where the time went") for line in lines) == 1  # of rank 0 alone
    step = ending_of(RUN)["step"]
    again = subprocess.run(
        [*program, *shlex.split(resume)[1:], f"stop_after={step + 2}"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"at step {step}\n" in again.stdout
    assert "x 2 ranks on one node" in again.stdout
    assert again.stdout.count("next:") == 1
    spent = summary_of(RUN)["time_spent"]
    assert spent["total"] == pytest.approx(sum(spent.values()) / 2, abs=0.005)
    assert spent["start_up"] > 0


@pytest.mark.slow("trains and resumes")
def test_a_resumed_run_of_a_run_keeps_its_name(photos, here):
    make(photos, RUN).run()
    assert load(f"{RUN}/recipe.yaml").name == "digits"
    Path("recipe.yaml").write_text("extends: digits\n")
    assert load("recipe.yaml").name == "recipe"
