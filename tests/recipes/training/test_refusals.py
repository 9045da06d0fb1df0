"""What cannot be run is refused in one line that names the key, before anything is written."""

import pytest

from largebatch.recipes.errors import user_errors
from tests.recipes.runs import make, refused
from tests.recipes.training.test_init_from_images import AIRBENCH

WATCHERS = "tests.recipes.training.watchers"
STEP = ["epochs=20", "schedule.name=step", "schedule.end=0"]
SMALLER = "{from: 1ep, batch_size: 4, lr: keep}"
NOISE = "gradient_noise_every: a batch of"
SGD = "optimizer.name=sgd"

#: Keys, and a part of the message. There are 53 images, in steps of 16: 7 in 2 epochs.
REFUSED = [
    # --- data
    (["data.path=nowhere"], "data.path: no folder nowhere; it must hold train/<class>/"),
    (["data.train_shards=train-*"], "data.train_shards: only for shards; valid with sourc"),
    (["data.holdout=53"], "data.holdout: 53 of 53 training images leaves none to train on; val"),
    (["data.source=synthetic", "data.holdout=20"], "data.holdout: not for synthetic images; val"),
    (["init.images=40"], "init.images: test_resnet has no method init_from_images; valid: null, o"),
    (["init.images=4", "init.from=x"], "init.images: init.from has all weights already; vali"),
    ([*AIRBENCH, "init.images=null"], "init.images: airbench sets weights from training images;"),
    ([*AIRBENCH, "init.images=53"], "init.images: 53 of 53 training images; valid: below 53"),
    (["resume=no/such"], "resume.from: no/such is not a checkpoint"),
    # --- the length of the run, its schedule and its stages
    (["epochs=0.1"], "epochs: 0.1 is less than one step; valid: at least 0.302, as an epoch is 3."),
    (["stop_after=0.01ep"], "stop_after: 0.01ep is less than one step"),
    (
        ["batch_size=65536", "micro_batch_size=null"],
        "batch_size: 65536 is too large for a run of 2 epochs of 53 training images; valid: at "
        "most 106",
    ),
    (["schedule.warmup=3ep"], "warmup: 3ep (10 steps) is longer than the run, 2 epochs (7 steps)"),
    (
        [*STEP, "schedule.milestones=[10ep,5ep]"],
        "schedule.milestones: 5ep (17 steps) does not come after 10ep (33 steps)",
    ),
    (
        ["schedule.decay=1ep", "schedule.decay_from=start"],
        "schedule.decay: 1ep (3 steps) from the start of the run is not longer than the warm-up",
    ),
    (["stages=[{from: 1ep, batch_size: 64}]"], "0.lr: needed with batch_size; valid: keep, linear"),
    (["stages=[{from: 1ep, image_size: 64, lr: keep}]"], "0.lr: only with batch_size; valid"),
    (["stages=[{from: 1ep}]"], "0.from: nothing changes there; valid: add image_size, batch_size"),
    (["stages=[{image_size: 64}]"], "stages.0.from: missing; it has no default"),
    (
        ["stages=[{from: 1ep, image_size: 24}, {from: 2ep, batch_size: 94, lr: keep}]"],
        "micro_batch_size: 4 does not divide stages.1.batch_size 94; valid: a divisor, such as 2",
    ),
    (
        [f"stages=[{SMALLER}, {{from: 2, image_size: 36}}]"],
        "stages.1.from: 2 does not come after 1ep; valid: stages in order",
    ),
    (
        ["stages=[{from: 1ep, image_size: 36}]", "data.eval_resize=35"],
        "data.eval_resize: 35 is smaller than the size of evaluated images; valid: at least 36",
    ),
    # --- precision, gradients and the loss
    (["loss_scale=0"], "loss_scale: must be a positive number or one of auto, dynamic, none"),
    (["precision=O3", SGD], "precision: sgd cannot unscale FP16"),
    (
        ["gradient_noise_every=2", "micro_batch_size=16"],
        f"{NOISE} 16 images is one backward pass, with no smaller batch to compare it with; "
        "valid: a micro_batch_size of at most 8, or null",
    ),
    (["gradient_noise_every=2", f"stages=[{SMALLER}]"], f"{NOISE} 4 images is one backward pass"),
    (["gradient_noise_every=9ep"], "gradient_noise_every: 9ep is longer than the run, 7 steps"),
    ([SGD, "trust_ratios_every=3"], "trust_ratios_every: sgd has no trust ratios; valid"),
    (["mixing.group=3"], "mixing.group: 3 images do not pair up; valid: an even number"),
    (
        ["mixing.cutmix=1", "batch_size=48", "micro_batch_size=24"],
        "mixing.group: 32 does not divide a micro-batch of 24; valid: an even div",
    ),
    (["loss.threshold=0.2"], "loss.threshold: only for name binary-cross-entropy; valid with"),
    # --- what watches the run, and what is the user's own
    (["comm.algorithm=null", "comm.plan=no.json"], "plan no.json: No such file"),
    (["profile.steps=15..10"], "profile.steps: 15..10 runs backwards; valid: "),
    (["profile.steps=0..3"], "profile.steps: '0..3' is not a range of steps from 1 on; valid: 10"),
    (["profile.steps=5..9"], "profile.steps: 5..9 goes beyond the end of the run, step 7; valid: "),
    (["profile={steps: 2, ranks: [0, 1]}"], "profile.ranks: no rank 1 among 1; valid: 0"),
    (["track=[wandb,wandb]"], "track: wandb, wandb repeats a name; valid: each once"),
    (["callbacks=[{name: a:b, arg: {}}]"], "did you mean 'callbacks.0.args'? Valid: name, args"),
    ([f"callbacks=[{WATCHERS}:Recoder]"], "has no 'Recoder'; did you mean 'Recorder'? Valid: a"),
    (["callbacks=[nowhere:Mine]"], "callbacks: no module 'nowhere' for nowhere:Mine; valid: a"),
    ([f"callbacks=[{WATCHERS}:not_a_callback]"], "makes a object; valid: a subclass of"),
    ([f"callbacks=[{WATCHERS}:Fails]"], "does not take {}: TypeError: Fails.__init__() missing"),
    (["model.name=a b:net"], "model.name: 'a b:net' is not a dotted path; valid: such as mypkg."),
    (["model.name=json:dumps"], "model.args: json:dumps does not take {}: TypeError"),
    (["model.name=builtins:dict"], "model.name: builtins:dict makes a dict; valid: a factory"),
    (["optimizer.name=torch.optim:AdamX"], "torch.optim has no 'AdamX'; did you mean 'Adam'?"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_what_cannot_be_run_is_refused_in_one_line(photos, tmp_path, keys, message):
    assert message in refused(make, photos, tmp_path / "run", *keys, kind=user_errors())
    assert not (tmp_path / "run").exists()
