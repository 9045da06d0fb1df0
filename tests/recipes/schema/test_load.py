"""Recipes are found, extended, overridden and validated."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import yaml

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import RECIPE, differences, load, with_defaults
from largebatch.recipes.schema.retired import RETIRED

MINIMAL = """
# A head comment.
# Its second line.
model: {name: resnet18}
data: {source: synthetic}
batch_size: 64
epochs: 2
optimizer: {lr: 1.0}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "base.yaml").write_text(MINIMAL.lstrip())
    return tmp_path


def test_a_recipe_extends_another_by_path_or_name(folder):
    (folder / "child.yaml").write_text(
        "extends: base.yaml\nbatch_size: 128\noptimizer: {momentum: 0.5}\n"
    )
    (folder / "grandchild.yaml").write_text("# Mine.\nextends: child.yaml\noptimizer: {lr: 3}\n")
    loaded = load(str(folder / "grandchild.yaml"))
    assert loaded.name == "grandchild"
    assert loaded.head == "Mine."
    assert (loaded.recipe.batch_size, loaded.recipe.epochs) == (128, 2)
    assert (loaded.recipe.optimizer.lr, loaded.recipe.optimizer.momentum) == (3, 0.5)
    (folder / "recipe.yaml").write_text("extends: base.yaml\n")  # as a search for a rate leaves it
    assert load(str(folder / "recipe.yaml")).name == folder.name
    (folder / "mine.yaml").write_text("extends: digits\nepochs: 3\n")
    mine = load(str(folder / "mine.yaml")).recipe
    assert mine == load("digits", ["epochs=3"]).recipe


def test_args_belong_to_the_optimizer_that_they_are_given_with():
    def args(*keys):
        return load("cifar10-muon-b256", [f"optimizer.{key}" for key in keys]).recipe.optimizer.args

    others = args("args.others.momentum=0.5")["others"]
    assert others == {"rule": "sgd", "lr_scale": 1.25, "momentum": 0.5}
    assert args("name=muon", "args.ns_steps=3")["norm_projection"] is True
    assert args("name=lars") == {}
    assert args("args.betas=[0.8,0.9]", "name=adamw") == {"betas": [0.8, 0.9]}


DROPPED = "optimizer.args of cifar10-muon-b256 are dropped: optimizer.name is now sgd"
NO_EFFECT = "{} has no effect: optimizer.name is {}, and it is for {} only"


@pytest.mark.parametrize(
    ("recipe", "keys", "notice"),
    [
        ("cifar10-muon-b256", ["name=sgd", "args={fused: true}"], DROPPED),
        ("cifar10-muon-b256", ["name=muon"], None),
        ("digits", ["name=sgd"], None),  # it has no args
        ("digits", ["name=sgd", "dialect=torch"], ("dialect", "sgd", "lars")),
        ("digits", ["dialect=torch"], None),
        ("digits", ["name=adamw", "momentum=0.8"], ("momentum", "adamw", "lars, sgd and muon")),
        ("digits", ["name=muon", "momentum=0.8"], None),
        ("digits", ["name=muon", "dialect=torch"], ("dialect", "muon", "lars")),
        ("digits", ["name=Adagrad", "momentum=0"], ("momentum", "Adagrad", "lars, sgd and muon")),
    ],
)
def test_overrides_without_effect_and_args_that_go_are_reported(recipe, keys, notice):
    if isinstance(notice, tuple):
        key, *others = notice
        notice = NO_EFFECT.format(f"optimizer.{key}", *others)
    found = load(recipe, [f"optimizer.{key}" for key in keys]).notices
    assert found == ((notice,) if notice else ())


def test_a_circle_is_refused(folder):
    for here, there in (("a", "b"), ("b", "a")):
        (folder / here).mkdir()
        (folder / here / f"{here}.yaml").write_text(f"extends: ../{there}/{there}.yaml")
    with pytest.raises(RecipeError, match=r"extends itself: a.yaml -> b.yaml -> a.yaml"):
        load(str(folder / "a" / "a.yaml"))


def test_an_extended_recipe_is_next_to_the_recipe_or_in_the_package(folder, monkeypatch):
    (folder / "child.yaml").write_text("extends: base.yaml")
    (folder / "mine.yaml").write_text("extends: digits.yaml")
    (folder / "here").mkdir()
    for name in ("base.yaml", "digits.yaml"):
        (folder / "here" / name).write_text("epochs: -1")
    monkeypatch.chdir(folder / "here")
    assert load("../child.yaml").recipe.epochs == 2
    assert load("../mine.yaml").recipe == load("digits").recipe


def test_overrides_are_typed_and_reach_into_sections():
    values = {
        **{"batch_size": (512, 512), "optimizer.lr": ("1e-3", 1e-3), "log_every": ("7", 7)},
        **{"schedule.warmup": ("31ep", "31ep"), "schedule.decay": ("0.50dur", "0.5dur")},
        **{"data.crop_area": ("[0.1,0.9]", (0.1, 0.9)), "model.args.drop_rate": ("0.5", 0.5)},
        **{"evaluate_every": ("null", None), "run_dir": ("2024-02-30", "2024-02-30")},
    }
    recipe = load("digits", [f"{key}={text}" for key, (text, _) in values.items()]).recipe
    for key, (_, value) in values.items():
        assert reduce(getitem, key.split("."), recipe.model_dump()) == value


def test_resume_may_be_written_short():
    path = "runs/x/checkpoints/step-00000004"
    for keys, expected in {
        "resume=false": (None, False),
        f"resume={path}": (path, False),
        "resume.from=latest resume.reshard=true": ("latest", True),
        "resume=true resume.reshard=true": ("latest", True),
        "resume.reshard=true resume=true": ("latest", True),
    }.items():
        resume = load("digits", keys.split()).recipe.resume
        assert (resume.from_, resume.reshard) == expected, keys


STEP = "schedule.name=step schedule.end=0"
WRONG = {
    "optimizer.lrr=3": "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'? Valid: those of "
    "`largebatch recipes keys optimizer`",
    "lr=3": "unknown key 'lr'; did you mean 'optimizer.lr'? Valid: those of `",
    "decay=5ep": "unknown key 'decay'; did you mean 'schedule.decay' or 'ema.decay'? Valid",
    "optimizer.learning_rate=1": "did you mean 'optimizer.lr'? Valid: ",
    "qqq=0": "unknown key 'qqq'; valid: those of `largebatch recipes keys`",
    "schedule.warm.up=3": "unknown key 'schedule.warm'; did you mean 'schedule.warmup'?",
    "optimizer.momentum=1": "optimizer.momentum: input should be less than 1, not 1",
    "optimizer.lr=.inf": "optimizer.lr: input should be a finite number",
    "optimizer.name=adam": "optimizer.name: no optimizer 'adam'; did you mean 'Adam'? Valid: lars,",
    "micro_batch_size=48": "micro_batch_size: 48 does not divide batch_size 256",
    "schedule.warmup=5epochs": "schedule.warmup: '5epochs' is not a length: write epochs as '5ep'",
    "schedule.warmup_shape=exponential": "schedule.start: an exponential warm-up cannot "
    "start at 0; valid: above 0",
    "schedule.milestones=[30ep]": "milestones: only for name step; valid with name polynomial: []",
    "schedule.name=constant": "schedule.end: only for name polynomial or cosine; valid with",
    "data.eval_resize=30": "data.eval_resize: 30 is smaller than the size of evaluated images; "
    "valid: at least 32",
    "data.crop_area=[0.5,0.2]": "data.crop_area: 0.5 is above 0.2; valid: [smallest, largest]",
    "data.flip=2": "data.flip: must be a probability from 0 to 1, or alternating",
    "data.translate=224": "data.translate: 224 would move images out of view; valid: below image_s",
    'data.translate=20 stages=[{"from":"5ep","image_size":16}]': "valid: below image_size, 16",
    "data.crop_area=[0.5,2]": "data.crop_area: a crop cannot exceed the image; valid: at most",
    "data.path=null": "data.path: needed for source folder; valid: a folder or URL",
    "precision=fp8": "precision: input should be 'auto', 'fp32', 'bf16', 'fp16', 'bf16-master', "
    "'fp16-master' or 'fp16-pure', not 'fp8'",
    "comm.plan=x.json": "comm.plan: cannot be combined with algorithm hierarchical; valid with it:",
    "model.args.in_chans=1": "model.args.in_chans: set by the trainer; valid: leave it out",
    "data.std=[1,0,1]": "data.std.1: input should be greater than 0, not 0",
    "seed=false": "seed: input should be a valid integer, not False",
    "log_every=0": "log_every: must be longer than 0",
    "optimizer=null": "optimizer: input should be its keys, such as optimizer.name, not None",
    "schedule.milestones=30ep": "milestones: input should be a list, not '30ep'",
    "batch_size": "override 'batch_size' is malformed; valid: key=value",
    # Numbers of YAML 1.1 only, and beyond 64 bits.
    "batch_size=12:30:45": "batch_size: ",
    "batch_size=010": "batch_size: ",
    f"seed={10**30}": "seed: ",
    # Values that do not go together.
    "target_accuracy=99 evaluate_every=null": "target_accuracy: needs evaluate_every; valid",
    "optimizer.nesterov=true optimizer.momentum=0": "optimizer.nesterov: needs momentum > 0",
    STEP: "schedule.milestones: needed for name step; valid: such as",
    **{
        f"{STEP} schedule.milestones=[30ep,500] schedule.{key}": "only for name polynomial"
        for key in ("decay=5ep", "power=3", "decay_from=start")
    },
    "schedule.warmup_shape=exponential schedule.start=0.1 optimizer.lr=0": "optimizer.lr: an "
    "exponential warm-up needs a peak; valid: above 0",
}
LR_TOO = "scale: linear derives optimizer.lr, which cannot be set too; valid: scale=null, or no lr"
NOT_SCALED = {
    "batch_size=512 optimizer.lr=1 scale=linear": LR_TOO,
    'scale=linear optimizer={"lr":1}': LR_TOO,
    "scale=cubic": "recipe resnet50-sgd-b256: scale: input should be 'linear' or 'sqrt', not",
    "scale=linear batch_size=many": "batch_size: input should be a valid int",
    "scale=sqrt batch_size=0": "batch_size: input should be greater than 0",
    "scale=linear batch_size=512 optimizer=null": "optimizer: input",
    "scal=linear": "unknown key 'scal'; did you mean 'scale'?",
    "scale=linear batch_size=80": "micro_batch_size: 32 does not divide batch_size 80; valid: a "
    "divisor, such as 20",
    "scale=linear batch_size=32 schedule.start=0.05": "scale: the scaled learning rate 0.0125 is "
    "below schedule.start, 0.05, which is not scaled; valid: set schedule.start too",
    'scale=linear batch_size=512 stages=[{"from":"3ep","batch_size":1024,"lr":"keep"}]': "scale: "
    "cannot be combined with stages that set batch_size; valid: stages=[], or",
}


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        *(("digits", *case) for case in WRONG.items()),
        *(("resnet50-sgd-b256", *case) for case in NOT_SCALED.items()),
    ],
)
def test_a_mistake_is_named_in_one_line(name, overrides, message):
    with pytest.raises(RecipeError) as error:
        load(name, overrides.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: [", "not YAML in UTF-8: line 1: expected the node content"),
        ("model: caf\xe9".encode("latin-1"), "mine.yaml: not YAML in UTF-8: 'utf-8' codec"),
        ("epochs: 1\nseed: 1\nepochs: 2\n", "mine.yaml: .*line 3: duplicate key 'epochs'"),
        ("data: {path: a, path: b}\n", "line 1: duplicate key 'path'"),
        ("- a\n- b\n", "no keys found; valid: lines such as `epochs: 90`"),
        ("model: {name: resnet18}\n", "data: missing; it has no default"),
        ("extends: no/x.yaml\n", "^unknown recipe 'no/x.yaml'; valid: those of "),
        ("extends: digit\n", "unknown recipe 'digit'; did you mean 'digits'. Valid: those of "),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecipeError, match=message):
        load(str(path))


def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
    def read_text(*_, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(RecipeError, match=r"base.yaml: cannot be read: Permission denied"):
        load(str(folder / "base.yaml"))


def test_a_recipe_of_an_earlier_version_gets_the_defaults_of_the_keys_that_it_lacks():
    recipe = load("digits", ["data.verify=strict", "optimizer.args.share=true"]).recipe
    now = recipe.model_dump(mode="json", by_alias=True)
    old = json.loads(json.dumps(now))
    del old["data"]["verify"], old["resume"], old["stages"]
    old["data"]["gone"] = old["gone"] = 1
    filled = with_defaults(old)
    assert filled == {**now, "data": {**now["data"], "verify": "decode", "gone": 1}, "gone": 1}
    assert differences(filled, now) == ['data.verify is now "strict", was "decode"']


def test_a_retired_key_goes_from_the_recipe_of_a_run_if_it_has_its_default(folder):
    whole = load("digits", ["stages=[{from: 5, image_size: 24}]"]).recipe
    for key, default in RETIRED.items():
        *sections, name = key.split(".")
        cases = [(default, RECIPE), (default, "mine.yaml"), ("other", RECIPE)]
        if default is ...:
            cases = [(True, RECIPE), (False, RECIPE)]
        for value, named in cases:
            inner = content = whole.model_dump(mode="json", by_alias=True)
            for section in sections:
                inner = inner[section[:-2]][0] if "[]" in section else inner.setdefault(section, {})
            inner[name] = value
            (folder / named).write_text(yaml.safe_dump(content))
            if default is ... or (value, named) == (default, RECIPE):
                assert load(str(folder / named)).recipe == whole, key
                continue
            message = "unknown key" if value == default else r"gone since 0.1.0; valid: "
            with pytest.raises(RecipeError, match=message) as error:
                load(str(folder / named))
            assert value == default or str(error.value).startswith(key)
    with pytest.raises(RecipeError, match=r"^mixing.prob: 0.5 is of a run of an earlier version"):
        with_defaults({"mixing": {"prob": 0.5}})
