"""Every command answers a mistake in one line and with exit code 2, and writes nothing."""

import pytest

from tests.conftest import write_images
from tests.recipes.commands.test_app import run
from tests.recipes.runs import BASE
from tests.recipes.tune.critical_batch.law import SMALL

TRAIN = "train digits data.path={photos}"
SCHEDULE = "schedule digits data.path=nowhere"
SIMULATE = "comm simulate resnet50-b65536"
P40 = f"{SIMULATE} --gpu p40"
COMM = "comm tune --out plan.json --nproc 2"
#: A network that is counted quickly, in a large recipe.
PLAN = (
    "plan resnet50-b65536 model.name=test_resnet data.image_size=32 data.eval_resize=32"
    " --measured 128:1000"
)
OWN = f"{PLAN} --links nvlink4+ndr-x8"
TUNE = f"tune lr digits {' '.join(BASE)} data.path={{photos}} data.holdout=13 epochs=1 --out x"
CRITICAL = f"critical-batch digits {' '.join(SMALL)} data.path={{photos}}"
FOLDER = "data prepare folder {photos} --out x"
MISTAKES = {
    "train digits optimzer.lr=3": "did you mean 'optimizer'",
    "train digit": "did you mean 'digits'? Valid: those of ",
    f"{TRAIN} --nproc 2 batch_size=129 micro_batch_size=43": "batch_size: 129 does not divide into "
    "micro-batches of 43 on 2 ranks",
    "train digits data.path=nowhere/digits": "no folder nowhere/digits",
    "train digits data.path={empty_class}": "train/b has no images",
    f"{TRAIN}/train": "data.path: {photos}/train has no val/ to evaluate on; valid: ",
    f"{TRAIN} comm.ranks_per_node=2": "ranks_per_node: 1 ranks cannot be split into nodes of 2",
    "recipes keys optimiser": "unknown section 'optimiser'; did you mean 'optimizer'? Valid: model",
    "schedule digits epochs=0.01": "epochs: 0.01 is less than one step",
    f"{SCHEDULE} schedule.warmup=30ep": "schedule.warmup: 30ep (168 steps) is longer than the run, "
    "20 epochs (112 steps)",
    # before the recipe is looked for
    "schedule nowhere --out x.what": "--out: cannot write x.what; valid: a name with .png, "
    ".svg or .pdf",
    f"{SCHEDULE} --out no/x.png": "--out: no folder no for x.png; valid: one that exists",
    "tune precision digits data.path={photos} resume=true": "resume: true takes the newest "
    "checkpoint of a run folder; valid here: resume=PATH",
    "runs nowhere": "DIR: no folder nowhere; valid: a folder that holds runs",
    "runs .": "holds no run; valid: the folder of a run, which has a metrics.jsonl",
    "runs . --sort top-1": "unknown key 'top-1'; did you mean 'top1'? Valid: run, ",
    f"{SIMULATE} --measured 128:9": "--links: missing; valid: INTRA+INTER, such as nvlink4+ndr-x8",
    f"{SIMULATE} --measured 2470": "--measured: '2470': no throughput; valid: [GPUSx]IMAGES:RATE",
    f"{SIMULATE} --measured 64:9ms,64:9ms": "images: 64 twice; valid: [GPUSx]IMAGES:RATE",
    f"{SIMULATE} --measured 64:9,8x96:99": "not one or two throughputs of the same GPUs; valid: [",
    f"{SIMULATE} --gpu a100 --measured 8:9000": "is no part of a step of 0.000888",
    SIMULATE: "--measured: missing; valid: such as 256:2470 for 2,470 images/s of one GPU with 256",
    f"{SIMULATE} --gpu p4": "--gpu: unknown GPU 'p4'; did you mean 'p40'? Valid: p40, p100",
    f"{P40} --gpus 1": "--gpus: 1 needs no all-reduce; valid: 2 or more",
    f"{P40} --gpus 100": "--gpus: 100 GPUs do not fill nodes of 8; valid: a m",
    f"{P40} model.name=resnet18": "of p40 is for resnet50 only",
    f"{P40} --links pcie3+edrx": "between nodes; did you mean 'edr'? Valid: INTRA+INTER",
    f"{P40} --plan none.json": "plan none.json: No such file",
    f"{P40} --fitted none.json": "--fitted: none.json: No such file",
    f"{P40} micro_batch_size=null": "--images-per-gpu: missing, and the recipe",
    "comm tune --out x.json": "--nproc: missing; valid: a number of processes, or use torchrun",
    f"{COMM} --wire fp8": "--wire: unknown dtype 'fp8'; valid: fp16, bf16",
    f"{COMM} --wire fp16 --sum-dtype fp64": "--sum-dtype: unknown dtype 'fp64'; valid: fp32",
    f"{COMM} --sum-dtype fp32": "--sum-dtype: nothing is sent in half precision",
    f"{COMM} --out plan.txt": "--out: cannot write a plan to plan.txt; valid",
    f"{COMM} --recipe digits": "--recipe: must be given together with --images",
    f"{PLAN} --gpus eight": "--gpus: 'eight' is no list of numbers; valid: such as 64 or 8,64",
    f"{PLAN} --gpus 48": "--gpus: 48 does not divide batch_size 65536; valid: 32 or 64 GPUs",
    f"{OWN} --gpus 16 --gpus-per-node 3": "16 GPUs do not fill nodes of 3; valid: a mu",
    f"{OWN} batch_norm.ranks=3": "batch_norm.ranks: 3 does not divide",
    f"{OWN} --fitted none.json": "--fitted: given together with other options on links",
    f"{TUNE} --lr 2": "--lr: '2' is not a range; valid: LOW..HIGH, such as 0.1..10",
    f"{TUNE} --runs 1 --minutes 1": "--runs: cannot be combined with --minutes",
    f"{TUNE} --runs 5": "--runs: 5 is too little: the shortest trial takes about 1 runs, and",
    f"{CRITICAL} --batches 8,x": "--batches: '8,x' is not a list of whole numbers; valid: such as",
    f"{CRITICAL} --batches 4,64": "--batches: 64 is not possible with 40 training images; valid:",
    f"{CRITICAL} --rule cubic": "--rule: unknown: 'cubic'; valid: linear, sqrt",
    f"{CRITICAL} --epochs 1 --batches 4,8": "--epochs: 1 are too few for a batch of 8, which ",
    f"{CRITICAL} --nproc 3": "batch_size",
    "data prepare mnist": "unknown data set 'mnist'; valid: digits, cifar10, imagenet, folder",
    f"{FOLDER} --format zip": "unknown format 'zip'; valid: folder, webdataset",
    f"{FOLDER} --images-per-shard 0": "images_per_shard: 0 is too small; valid:",
    "data prepare folder --out x": "SRC: missing; valid: a folder of your images",
    "data prepare digits {photos} --out x": "SRC: not for digits; valid for folder",
    f"{FOLDER} --allow-partial": "--allow-partial: not for folder; valid for cifar10 and imagenet",
    FOLDER: "the output would be the same folders; valid: --split, --format or --resize",
    "data prepare imagenet --out x": "--train-archive is missing: download "
    "ILSVRC2012_img_train.tar, 138 GB, from https://",
    "data prepare cifar10 --archive no.tar --out x": "--archive: there is no file no.tar: download "
    "cifar-10-python.tar.gz from",
    "data check nowhere": "nowhere; valid: a data set, or its folder train or v",
    "data check {photos} --workers 0": "--workers: 0 is too small; valid: at",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_reported_in_one_line(photos, tmp_path, monkeypatch, words):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    write_images(tmp_path / "data" / "train", {"a": 2})
    (tmp_path / "data" / "train" / "b").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    given = {"photos": photos, "empty_class": tmp_path / "data"}
    result = run(*words.format(**given).split())
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("largebatch: error: ")
    assert MISTAKES[words].format(**given) in line
    left = sorted(path.name for path in (tmp_path / "here").rglob("*"))
    assert left == (["journal.log", "x"] if "--runs 5" in words else [])
