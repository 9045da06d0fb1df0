"""The model card shows what comes from a run's files as text."""

import json
import shutil

import pytest
from markdown_it import MarkdownIt

from largebatch.recipes.schema.load import RECIPE
from tests.recipes.trained.test_export import card_of, exported

pytestmark = pytest.mark.slow("trains a small network")

HOSTILE = "a|b <img src=x onerror=alert(1)> `c` [d](http://x) ![e](f) *g*"


def test_what_comes_from_files_is_text_on_the_card(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    path, summary = tmp_path / "run" / RECIPE, tmp_path / "run" / "summary.json"
    path.write_text(path.read_text().replace("recipe digits as", f"recipe {HOSTILE} as"))
    facts = dict.fromkeys(["device", "train_images", "world_size"], f"{HOSTILE}\n# h\n\n| i | j |")
    facts |= {"versions": {HOSTILE: HOSTILE}}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | facts))
    exported(tmp_path / "run", "safetensors", tmp_path / "out")
    about, text = card_of(tmp_path / "out")
    assert about.model_name == HOSTILE
    blocks = MarkdownIt("commonmark").enable("table").parse(text)
    tokens = [token for block in blocks for token in (block, *(block.children or ()))]
    kinds = [token.type for token in tokens]
    assert not {*kinds} & {"html_block", "html_inline", "link_open", "image", "em_open"}
    assert (kinds.count("table_open"), kinds.count("heading_open")) == (2, 6)
    assert kinds.count("td_open") == 3 + 2 * (kinds.count("tr_open") - 3)
    shown = "".join(token.content for token in tokens if token.type == "text")
    assert shown.count(HOSTILE) == 7  # in the heading, in four rows, and twice as a package
