"""The page: valid HTML that loads nothing, whose data are the metrics and whose text is escaped."""

import base64
import errno
import hashlib
import json
import os
import re
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from largebatch.recipes import report
from largebatch.recipes.commands.app import main
from largebatch.recipes.commands.tree import app
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.report import page
from largebatch.recipes.report.groups import groups, read_runs
from largebatch.recipes.training.lr import learning_rates
from tests.recipes.report.written_runs import write_run

VOID = {"meta", "input", "line", "br", "link", "img"}
#: Attributes through which a page loads something.
LOADING = {"src", "srcset", "href", "xlink:href", "data", "poster", "action", "background"}
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


class Page(HTMLParser):
    """A page whose elements must be closed in order and whose identifiers must be distinct."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts, self.ids = [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len({*self.ids})

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        names = [name for name, _ in attributes]
        assert len(names) == len({*names})
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def data(self):
        return json.loads(next(t for t in self.texts["script"] if t.startswith('{"axes"')))

    @property
    def visible(self):
        return " ".join(t for k, v in self.texts.items() if k not in ("script", "style") for t in v)


@pytest.fixture(autouse=True)
def _short_plotly(monkeypatch):
    """Parsing 5 MB takes seconds; `test_plotly_is_on_the_page` has it in full."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "var Plotly = {};")


def rendered(*folders, target=None):
    return Page(page.render(groups(read_runs(folders)), target))


def curve(found, title, name):
    (chart,) = [chart for chart in found.data["charts"] if chart["title"] == title]
    (line,) = [line for line in chart["curves"] if line["name"] == name]
    return found.data["places"][line["place"]], line["values"]


def test_its_data_are_the_metrics(tmp_path):
    timeline, lines = write_run(tmp_path / "run")
    found = rendered(tmp_path / "run", target=50.0)
    for title, name, split, key in (
        ("Loss", "training", "train", "loss"),
        ("Loss", "validation", "val", "loss"),
        ("Top-1 accuracy", "validation", "val", "top1"),
        ("Throughput", "training", "train", "images_per_second"),
    ):
        place, values = curve(found, title, name)
        of_split = [line for line in lines if line["split"] == split]
        assert values == [line[key] for line in of_split]
        assert place["step"] == [line["step"] for line in of_split]
        assert place["epoch"] == [line["epoch"] for line in of_split]
        assert place["images"] == [256 * line["step"] for line in of_split]
    recipe = read_runs([tmp_path / "run"])["run"].recipe
    place, values = curve(found, "Learning rate", "training")
    schedule = learning_rates(recipe, timeline).schedule
    assert values == [schedule(step) for step in place["step"]]
    assert "90.00\N{NO-BREAK SPACE}%" in found.visible
    assert "Training time to target, 50 %" in found.visible


def test_several_runs_are_overlaid(run_of):
    folders = [run_of(f"a{s}", seed=s) for s in (0, 1)] + [run_of("b", "optimizer.lr=2.0")]
    found = rendered(*folders)
    assert found.data["series"] == ["lr 4", "lr 2"]
    chart = next(c for c in found.data["charts"] if c["title"] == "Top-1 accuracy, validation")
    assert [(line["name"], line["series"]) for line in chart["curves"]] == [
        ("a0", 0),
        ("a1", 0),
        ("b", 1),
    ]
    axes = [a["value"] for tag, a in found.tags if tag == "input" and a.get("name") == "axis"]
    assert axes == ["step", "epoch", "images", "seconds"]
    assert all(set(axes) <= place.keys() for place in found.data["places"])


def test_several_runs_have_bars_of_where_their_time_went(run_of):
    def divided(line):
        parts = {"forward_seconds": 0.25, "backward_seconds": 0.5, "optimizer_seconds": 0.125}
        wait = {"input_seconds": 0.0} if line["split"] == "train" else {}
        return line | {k: v * line["seconds"] for k, v in parts.items()} | wait

    folders = [run_of("a", edit=divided), run_of("b", seed=1)]
    found = rendered(*folders)
    bars = [
        (float(a["x"]), float(a["width"])) for tag, a in found.tags if tag == "rect" and "x" in a
    ]
    assert bars == [(0, 0), (0, 25), (25, 50), (75, 12.5), (87.5, 12.5)]
    assert "not recorded" in found.visible
    assert "50.0" in found.texts["td"]
    assert "last top-1,\xa0%" in found.texts["th"]
    assert "All are of rank 0, whose wait for the all-reduce includes" in found.visible
    assert "that of the rank that waited longest" not in found.visible
    assert "share of time waiting for input, slowest rank,\xa0%" in found.texts["th"]
    assert "Older runs do not record the phases of a step" in found.visible
    assert "shares" not in rendered(folders[1], run_of("c", seed=2)).ids
    assert "stack" in rendered(folders[0]).ids
    assert "stack" not in rendered(folders[1]).ids


def test_it_loads_nothing(run_of):
    text = page.render(groups(read_runs([run_of("a"), run_of("b", seed=1)])))
    found = Page(text)
    loading = [(tag, a) for tag, a in found.tags if LOADING & a.keys()]
    assert loading == []
    assert not [tag for tag, _ in found.tags if tag in ("link", "iframe", "object", "base", "img")]
    css = "".join(found.texts["style"])
    assert "url(" not in css
    assert "@import" not in css
    (policy,) = [a["content"] for tag, a in found.tags if "http-equiv" in a]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert len(hashes) == 2
    assert policy.split("; ") == [
        "default-src 'none'",
        " ".join(["script-src", *(f"'sha256-{one}'" for one in hashes)]),
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_its_script_takes_any_number_of_values():
    """A browser takes about 120,000 arguments; a heat map may have more values."""
    script = resources.files(report).joinpath("page.js").read_text(encoding="utf-8")
    assert not re.search(r"Math\.\w+\([^()]*\.\.\.", script)


def test_a_page_is_replaced_whole_or_not_at_all(run_of, tmp_path, monkeypatch):
    found, place = groups(read_runs([run_of("a")])), tmp_path / "pages" / "report.html"
    place.parent.mkdir()
    place.write_text("before")
    link = tmp_path / "link.html"
    link.symlink_to(place)

    def full(path, text, **options):
        path.write_bytes(text[:1000].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(RecipeError, match=r"--out: cannot write .*: No space left on device"):
            page.write_page(link, found)
    assert (place.read_text(), list(place.parent.iterdir())) == ("before", [place])
    page.write_page(link, found)
    assert place.read_text(encoding="utf-8").endswith("</html>\n")
    assert (link.is_symlink(), list(place.parent.iterdir())) == (True, [place])


def test_plotly_is_on_the_page(run_of, monkeypatch):
    monkeypatch.undo()
    text = page.render(groups(read_runs([run_of("a")])))
    start = text.index("plotly.js v")
    assert 3e6 < len(text) < 6e6
    end = text.index("</script>", start)
    assert end - start > 3e6  # nothing in it ends the element


def test_text_of_a_run_is_escaped(tmp_path):
    folder = tmp_path / HOSTILE.replace("/", "|")
    other = tmp_path / "b"
    write_run(folder, f"model.args={{a: {json.dumps(HOSTILE)}}}")
    write_run(other)
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("recipe digits as", f"recipe {HOSTILE} as"))
    layer = json.dumps({"split": "trust_ratio", "step": 10, "epoch": 1, HOSTILE: [1, 2, 3]})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(layer + "\n")
    for found in (rendered(folder), rendered(folder, other)):
        assert "img" not in [tag for tag, _ in found.tags]
        assert [tag for tag, _ in found.tags].count("script") == 3
        assert HOSTILE in found.visible
    assert rendered(folder).data["ratios"]["layers"] == [HOSTILE]


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ((), {"steps": 50, "summary": False}, "stopped before its end, at step 50 of 112"),
        ((), {"steps": 7}, "finished after 7 steps"),
        (("stages=[{from: 10ep, batch_size: 640, lr: linear}]",), {}, "global batch 256"),
    ],
)
def test_runs_of_all_kinds(run_of, keys, options, words):
    assert words in rendered(run_of("run", *keys, **options)).visible


def test_a_run_that_diverged(run_of):
    def edit(line):
        return line | {"loss": None} if line["step"] == 30 and line["split"] == "train" else line

    found = rendered(run_of("run", steps=30, summary=False, edit=edit))
    assert "diverged at step 30 of 112: the loss is not finite at step 30" in found.visible
    place, values = curve(found, "Loss", "training")
    assert (place["step"], values[-1]) == ([10, 20, 30], None)
    assert "A cross marks the last finite loss" in found.visible
    lines = {line["name"]: line for line in found.data["charts"][0]["curves"]}
    assert {name: line["diverged"] for name, line in lines.items()} == {
        "training": True,
        "validation": False,
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("label_smoothing", value) for value in ("abc", "[0.1]", "{a: 1}")),
        *(("seed", value) for value in ("[1, 2]", "abc", ".inf", "2020-01-01", "{a: [1]}")),
        ("batch_size", "[many]"),
        ("optimizer", "5"),
        ("model", "[resnet]"),
        ("stages", "{a: 1}"),
        ("stages", "[2020-01-01]"),
        ("target_accuracy", "[90]"),
        ("data", "null"),
    ],
)
def test_values_of_another_type_in_an_older_recipe_are_shown(run_of, tmp_path, key, value):
    folders = [run_of("a"), run_of("b"), run_of("c", seed=3)]
    for folder in folders[:2]:
        text = (folder / "recipe.yaml").read_text()
        text = re.sub(rf"^{key}:.*\n(?:[ -].*\n)*", "", text, flags=re.MULTILINE)
        (folder / "recipe.yaml").write_text(f"{text}{key}: {value}\n")
    assert "is not valid today" in rendered(folders[0]).visible
    rendered(*folders)
    assert command(*folders, "--json").exit_code == 0


@pytest.mark.parametrize("value", [None, [1], "abc", 5])
def test_values_of_another_type_in_a_summary_are_no_obstacle(run_of, value):
    folder = run_of("a")
    (folder / "recipe.yaml").unlink()
    about = json.loads((folder / "summary.json").read_text())
    names = ("machine", "versions", "skipped_images", "total_steps", "world_size", "device")
    (folder / "summary.json").write_text(json.dumps(about | dict.fromkeys(names, value)))
    rendered(folder)
    rendered(folder, run_of("b", seed=1))
    assert command(folder, "--json").exit_code == 0


def test_a_name_that_is_no_utf8(run_of, tmp_path):
    folder = tmp_path / os.fsdecode(b"run-\xff")
    run_of("run").rename(folder)
    page.write_page(tmp_path / "report.html", groups(read_runs([folder])))
    found = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "run-?" in found.visible


def test_fifty_runs(run_of):
    folders = [
        run_of(f"r{i}", f"optimizer.lr={1 + i // 2}", seed=i % 2, steps=20) for i in range(50)
    ]
    found = rendered(*folders)
    assert len(found.data["series"]) == 25
    assert all(len(chart["curves"]) == 50 for chart in found.data["charts"])
    rows = [a for tag, a in found.tags if tag == "th" and a.get("scope") == "row"]
    assert len(rows) == 25 + 25 + 25 + 50  # accuracy, time, differences and each run


def command(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_the_command_writes_the_page_or_prints_the_tables(run_of, tmp_path):
    folders = [run_of("a"), run_of("b", seed=1)]
    out = tmp_path / "report.html"
    result = command(*folders, "--out", out)
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert out.read_text(encoding="utf-8").endswith("</html>\n")
    result = command(*folders, "--json", "--target", 50)
    assert result.exit_code == 0
    (group,) = json.loads(result.stdout)["groups"]
    assert (group["top1"]["mean"], group["reached_target"]) == (90.0, 2)


def test_the_picture_leaves_out_a_damaged_line_and_says_so(run_of, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # which takes long
    folder = run_of("a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    result = command(folder)
    assert (result.exit_code, result.stdout) == (0, f"{folder}/report.png\n")
    assert "is damaged and left out." in result.stderr
    assert result.stderr.count("\n") == 1


def test_runs_that_have_just_begun_are_left_out_and_named(run_of, tmp_path):
    folders = [run_of("a"), run_of("b", edit=lambda line: None), run_of("c", seed=1)]
    out = tmp_path / "report.html"
    result = command(*folders, "--json", "--out", out)
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert [run["run"] for run in data["runs"]] == ["a", "c"]
    assert data["notes"] == ["b is left out: it has no metrics yet."]
    assert data["notes"][0] in Page(out.read_text(encoding="utf-8")).visible


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{e}", "{f}", "--json"], "RUN: {e} has no metrics yet; valid: a run that has reached"),
        (["{e}", "--json"], "RUN: {e} has no metrics yet; valid: a run that has reached"),
        (["{d}"], "RUN: {d}/report.png cannot be written: Is a directory; valid: a folder that"),
        (["{a}", "{b}"], "--out: missing for several runs; valid: --out report.html, or --json"),
        (["{a}", "--out", "{a}/x.png"], "--out: cannot write {a}/x.png; valid: a name with .html"),
        (["{a}", "--out", "{a}/no/x.html"], "cannot write {a}/no/x.html: No such file or direct"),
        (["{a}", "--json", "--target", "nan"], "--target: nan; valid: a percentage above 0 and up"),
        (["{a}", "--json", "--target", "101"], "--target: 101; valid: a percentage above 0"),
        (["{a}", "--target", "99"], "--target: has no part in report.png; valid: with --out or"),
        (["{a}", "--target", "0"], "--target: 0; valid: a percentage above 0 and up to 100"),
        (["{a}/no"], "RUN: {a}/no is no folder; valid: a run's folder, which holds metrics.jsonl"),
        (["{a}/.."], "RUN: {a}/.. holds no run; valid: a run's folder, which holds metrics.jsonl"),
        (["{a}", "{a}", "--json"], "RUN: {a} is named twice; valid: each run once"),
        (["{a}", "{a}/..", "--json"], "RUN: {a}/.. holds no run; valid: a run's folder"),
        (["{a}/no", "--out", "x.html"], "RUN: {a}/no is no folder; valid: a run's folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(run_of, words, message):
    folders = {"a": run_of("a"), "b": run_of("b", seed=1), "d": run_of("d")}
    (folders["d"] / "report.png").mkdir()
    folders |= {name: run_of(name, edit=lambda line: None) for name in "ef"}
    result = command(*(word.format(**folders) for word in words))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("largebatch: error: ")
    assert message.format(**folders) in result.stderr
    assert result.stdout == ""


def test_without_plotly_one_line_says_what_to_install(run_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(SystemExit) as end:
        main(["report", str(run_of("a")), "--out", str(tmp_path / "report.html")])
    assert end.value.code == 2
    advice = "plotly is not installed; valid: pip install 'largebatch[recipes]'"
    assert capsys.readouterr().err == f"largebatch: error: {advice}\n"
    assert not (tmp_path / "report.html").exists()
