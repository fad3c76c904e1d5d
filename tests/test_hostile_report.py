"""--report of a run whose every text is hostile: the page shows it as text and nothing else."""

import json
from base64 import b64decode
from html.parser import HTMLParser

from extractions import HIDDEN, HOOKS, change_shard, edit, extract

from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect.report import make_report
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import run_of

HOSTILE = "\"><script>evil()</script><img/src=x/onerror=evil()>'<b onclick=evil()>&lt;evil>"
HOSTILE += "\x1b[31m\u202e$x^{$ {{ 7 * 7 }} {% evil %}"
NAMES = {key: f"blocks.{key}.hook{HOSTILE}" for key in HOOKS}


def page_of(root):
    folder = Folder(str(root))
    return make_report(folder, read_folders(folder))


class Page(HTMLParser):
    """Collects elements and attributes."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text = set(), [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def spoil(value):
    """Every text inside, hostile."""
    if isinstance(value, dict):
        return {name: spoil(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [spoil(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


def spoil_metadata(content):
    kept = ("identity", "format_version", "hooks")
    more = {
        "configuration": {"model_path": "m", "dataset_path": "d", "bucket_url": "b"},
        "model_commit": "c", "mesh": {"x": "1"}, "attention": {"name": "n"},
        "versions": {HOSTILE: "1"},
    }  # fmt: skip
    content |= {name: spoil(v) for name, v in (content | more).items() if name not in kept}
    content["identity"] |= dict.fromkeys(("text_column", "data", "dtype"), HOSTILE)
    for hook in content["hooks"]:
        hook["name"] = NAMES[hook["key"]]
    content["remote"] = None


def test_nothing_that_was_stored_becomes_a_part_of_the_page(tmp_path):
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    for root in (plain, hostile):
        extract(root, hook_facts={key: {"width": HIDDEN} for key in HOOKS})
    edit(hostile / "metadata.json", spoil_metadata)

    def rename(content):
        content["run"] = run_of(json.loads((hostile / "metadata.json").read_bytes())["identity"])
        for hook in content["hooks"]:
            hook["name"] = NAMES[hook["key"]]

    def rename_in_records(shard):
        for key, records in shard.items():
            for record in records:
                record["hook"] = NAMES[key]

    for number, path in enumerate(sorted(hostile.glob("shard_*.json")), 1):
        change_shard(hostile, number, rename_in_records)
        edit(path, rename)
    expected, found = (Page(page_of(root)) for root in (plain, hostile))
    assert "evil()" in found.text and "{{ 7 * 7 }}" in found.text
    assert all(character.isprintable() or character == "\n" for character in found.text)
    assert found.tags <= expected.tags
    assert "script" not in found.tags
    assert {n for n, _ in found.attributes} <= {n for n, _ in expected.attributes}
    images = [value for name, value in found.attributes if name == "src"]
    assert len(images) == [name for name, _ in expected.attributes].count("src")
    for image in images:  # they show numbers alone
        start, _, data = image.partition(",")
        assert start == "data:image/svg+xml;base64" and b"evil" not in b64decode(data)
