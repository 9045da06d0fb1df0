"""The page: valid HTML that loads nothing, and on which no text of a run is anything but text."""

import base64
import errno
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from largebatch.recipes.commands.tree import app
from largebatch.recipes.report.figures import figure
from largebatch.recipes.report.page import render
from largebatch.recipes.report.runs import read_runs
from tests.recipes.report.written_runs import append, end_diverged, with_phases, write_run

#: Attributes through which a page loads something.
LOADING = {"src", "srcset", "href", "xlink:href", "data", "poster", "action", "background"}
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


class Page(HTMLParser):
    """The tags of a page, and its text by the element that it stands in."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.element = [], {}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.element = tag

    def handle_endtag(self, tag):
        self.element = ""

    def handle_data(self, data):
        self.texts.setdefault(self.element, []).append(data)

    @property
    def visible(self):
        return " ".join(t for k, v in self.texts.items() if k not in ("script", "style") for t in v)


@pytest.fixture(autouse=True)
def _short_plotly(monkeypatch):
    """Parsing 5 MB takes seconds; `test_plotly_is_on_the_page` has it in full."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "var Plotly = {};")


def rendered(*folders):
    return Page(render(*read_runs(folders)))


def command(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_it_loads_nothing_and_admits_its_own_scripts_alone(run_of):
    text = render(*read_runs([run_of("a", edit=with_phases), run_of("b", seed=1)]))
    found = Page(text)
    assert [(tag, a) for tag, a in found.tags if LOADING & a.keys()] == []
    assert not [tag for tag, _ in found.tags if tag in ("link", "iframe", "object", "base", "img")]
    css = "".join(found.texts["style"])
    assert "url(" not in css
    assert "@import" not in css
    (policy,) = [a["content"] for tag, a in found.tags if "http-equiv" in a]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert len(hashes) == 3  # plotly, the curves and that of the page
    first, of_scripts, *others = policy.split("; ")
    assert (first, of_scripts.split()[0]) == ("default-src 'none'", "script-src")
    assert {*of_scripts.split()[1:]} == {f"'sha256-{one}'" for one in hashes}
    assert others == [
        *("style-src 'unsafe-inline'", "img-src data: blob:"),
        *("base-uri 'none'", "form-action 'none'"),
    ]


def test_text_of_a_run_is_text(tmp_path):
    folder, other = tmp_path / HOSTILE.replace("/", "|"), tmp_path / "b"
    write_run(folder, f"model.args={{a: {json.dumps(HOSTILE)}}}")
    write_run(other)
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("recipe digits as", f"recipe {HOSTILE} as"))
    about = {"step": 112, "recipe": HOSTILE, "device": HOSTILE, "backend": HOSTILE}
    (folder / "summary.json").write_text(json.dumps(about))
    ending = {"status": "failed", "reason": HOSTILE}
    layer = {"split": "trust_ratio", "step": 10, "epoch": 1, HOSTILE: [1, 2, 3]}
    append(folder, layer)
    for status, folders in ((None, [folder]), (None, [folder, other]), (ending, [folder])):
        if status:
            (folder / "ending.json").write_text(json.dumps(status))
        found = rendered(*folders)
        assert "img" not in [tag for tag, _ in found.tags]
        assert [tag for tag, _ in found.tags].count("script") == 3
        assert HOSTILE in found.visible
        # Plotly makes elements of some tags in what it shows.
        shown = json.dumps(figure(read_runs(folders)[0]))
        assert "<img" not in shown
        assert "&lt;img" in shown


def test_plotly_is_on_the_page(run_of, monkeypatch):
    monkeypatch.undo()
    text = render(*read_runs([run_of("a")]))
    start = text.index("plotly.js v")
    assert 3e6 < len(text) < 6e6
    assert text.index("</script>", start) - start > 3e6  # nothing in it ends the element


def test_a_page_is_replaced_whole_or_not_at_all(run_of, tmp_path, monkeypatch):
    run, place = run_of("a"), tmp_path / "pages" / "report.html"
    place.parent.mkdir()
    place.write_text("before")
    link = tmp_path / "link.html"
    link.symlink_to(place)

    def full(path, text, **options):
        path.write_bytes(text[:1000].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        result = command(run, "--out", link)
    assert "--out: cannot write " in result.stderr
    assert ": No space left on device; valid: a file in a folder" in result.stderr
    assert (place.read_text(), list(place.parent.iterdir())) == ("before", [place])
    assert command(run, "--out", link).stdout == f"{link}\n"
    assert place.read_text(encoding="utf-8").endswith("</html>")
    assert (link.is_symlink(), list(place.parent.iterdir())) == (True, [place])


def test_runs_that_have_just_begun_are_left_out_and_others_say_how_they_ended(run_of, tmp_path):
    folders = [run_of("a"), run_of("b", edit=lambda line: None), run_of("c", seed=1)]
    groups, notes = read_runs(folders)
    assert [*groups[0].runs] == ["digits, seed 0", "digits, seed 1"]
    assert notes == [f"{folders[1]} is left out: it has no metrics yet."]
    assert notes[0] in rendered(*folders).visible
    stopped = run_of("d", steps=50, summary=False)
    assert "stopped at epoch 8.907 of 20: its end is not" in rendered(stopped).visible
    diverged = run_of("e", steps=10, summary=False, edit=lambda line: line | {"loss": None})
    end_diverged(diverged, "the loss is not finite at step 1")
    folder = diverged.rename(tmp_path / os.fsdecode(b"run-\xff"))  # a name that is no UTF-8
    assert command(folder, "--out", tmp_path / "report.html").exit_code == 0
    visible = Page((tmp_path / "report.html").read_text(encoding="utf-8")).visible
    assert "diverged" in visible
    assert "run-?" in visible


def test_mistakes_are_one_line_and_exit_code_2(run_of):
    a = run_of("a")
    for words, message in (
        ([a, "--out", a / "x.png"], f"--out: cannot write {a}/x.png; valid: a name with .html"),
        ([a, "--out", a / "no" / "x.html"], f"cannot write {a}/no/x.html: No such file or direct"),
        ([a / "no"], f"RUN: {a}/no is no folder; valid: a run's folder"),
        ([a, a / "..", "--out", "x.html"], f"RUN: {a}/.. holds no run; valid: a run's folder"),
    ):
        result = command(*words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("largebatch: error: ")
        assert message in result.stderr
