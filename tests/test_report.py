"""--report: its numbers against NumPy, what the page holds, and how Chromium shows it."""

import gzip
import html
import json
import pickle
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from html.parser import HTMLParser
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from cloud import REPOSITORY
from command_line import main
from extractions import (
    HIDDEN,
    HOOKS,
    TOKENS,
    VOCABULARY,
    change_shard,
    change_table,
    edit,
    extract,
    load,
    replace_shard,
)
from tokenizers import Tokenizer, decoders, models

from activation_extraction import ActivationStorage
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.inspect import report, report_numbers
from activation_extraction.inspect.report_numbers import (
    HookReport,
    TokenSample,
    read_sample,
    throughput,
)
from activation_extraction.store.folder import Folder
from activation_extraction.store.statistics import sums_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECTIONS = ["glance", "norms", "tokens", "speed"]
WIDTHS = {key: {"width": HIDDEN} for key in HOOKS}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    extract(root, hook_facts=WIDTHS)
    return root


def page_of(root, target):
    """The page about a run."""
    assert report.show_report(Folder(str(root)), str(target / "report.html")) == 0
    return (target / "report.html").read_text()


def text_of(page):
    """What the page says, in one line."""
    return " ".join(re.sub(r"<style>.*</style>|<[^>]*>", "", page, flags=re.DOTALL).split())


def test_the_numbers_are_those_that_numpy_gives(run):
    dataset = ActivationDataset(str(run))
    sample = read_sample(dataset, list(dataset.hooks))
    assert list(sample.buckets) == [0, 1, 2, 3, 4, 8]
    for number, (key, name) in enumerate(HOOKS.items()):
        found = HookReport(sample, number, name)
        records = [record for number in range(1, 5) for record in load(run, number)[key]]
        every = np.concatenate([record["activation"] for record in records]).astype(np.float64)
        norms = np.linalg.norm(every, axis=1)
        expected = np.quantile(norms, [0.01, 0.25, 0.5, 0.75, 0.99, 1])
        np.testing.assert_allclose(found.norms, expected, rtol=1e-5)
        assert found.largest[0][0] == norms.argmax()
        fours = norms.reshape(-1, TOKENS)[:, 4:8]
        assert found.by_position[4] == pytest.approx(np.median(fours), rel=1e-5)


def sample_of(vectors, token_ids=None, position=None):
    """A sample of one document whose activations are these, at the only hook `h`."""
    count = len(vectors)
    position = np.arange(count, dtype=np.int32) if position is None else position
    return TokenSample(
        [],
        np.zeros(count, int),
        np.zeros(count, np.int32) if token_ids is None else token_ids,
        position,
        {"h": np.linalg.norm(vectors.astype(np.float64), axis=1)},
        {"h": sums_of([vectors], [position])},
        1,
    )


@pytest.mark.parametrize("firsts", [False, True])
def test_outliers_are_found_among_tokens_and_dimensions(firsts):
    """First tokens of documents would hide the dimensions of others, unless there are no others.
    Where most dimensions are zero, none is an outlier."""
    vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    vectors[:, 5] *= 20
    vectors[:, 2] -= 50
    vectors[:, 7] = 0
    vectors[0, 4] = 1e5
    vectors[9] *= 6  # no outlier
    position = np.zeros(500, np.int32) if firsts else None
    for mostly_zero in (vectors * 0, vectors * (np.arange(8) == 1)):
        assert HookReport(sample_of(mostly_zero), 0, "h").dimensions == []
    found = HookReport(sample_of(vectors, position=position), 0, "h")
    assert found.outlier.nonzero()[0].tolist() == [0]
    size = np.sqrt(np.square(vectors[0 if firsts else 1 :].astype(np.float64)).mean(axis=0))
    order = [4, 2, 5] if firsts else [2, 5]
    assert [number for number, _ in found.dimensions] == order
    ratios = [ratio for _, ratio in found.dimensions]
    np.testing.assert_allclose(ratios, (size / np.median(size))[order])


def test_the_largest_tokens_are_grouped_by_id_and_position():
    vectors = np.array([[9], [8], [7], [6], [5]], np.float32)
    sample = sample_of(vectors, np.array([4, 2, 4, 4, 2]), np.array([0, 1, 2, 0, 4]))
    assert HookReport(sample, 0, "h").largest == [(0, 2), (1, 2), (2, 1)]


def test_the_neighbours_of_a_token_end_with_its_document_and_where_a_token_was_not_kept():
    sample = sample_of(np.ones((9, 1), np.float32), position=np.array([0, 1, 2, 0, 1, 3, 4, 5, 6]))
    sample.document[3:] = 1
    found = [sample.around(token, 2) for token in (1, 3, 6, 8)]
    assert found == [slice(0, 3), slice(3, 5), slice(5, 9), slice(6, 9)]


def test_a_sample_is_spread_over_shards_and_stays_within_its_budget(run, monkeypatch):
    """The run has 3, 3, 3 and 1 samples in its shards."""
    dataset = ActivationDataset(str(run))
    monkeypatch.setattr(report_numbers, "TOKENS", (2 * TOKENS, 2 * TOKENS))
    monkeypatch.setattr(report_numbers, "SHARDS", 2)
    sample = read_sample(dataset, list(dataset.hooks))
    first, second = (document.sample_idx for document in sample.documents)
    assert sample.shards == 2 and first in (0, 1, 2) and second == 9
    for number, index in enumerate((first, second)):
        tokens = sample.token_ids[sample.document == number]
        np.testing.assert_array_equal(tokens, dataset[index].token_ids)


def test_throughput_leaves_out_the_time_in_which_nothing_ran():
    """Every shard took 10 s. The second half came a month later."""

    def shards(tokens):
        starts = [0.0] * 4 + [30 * 86400.0] * 4
        return [
            SimpleNamespace(began=start, committed=start + 10 * (1 + number % 4), tokens=each)
            for number, (start, each) in enumerate(zip(starts, tokens, strict=True))
        ]

    hosts = [shards([100, 200, 100, 100, 10, 10, 10, 10]), shards([100] * 8)[:4], []]
    edges, rates = throughput(hosts)
    assert edges.tolist() == [0, 40, 80] and rates.tolist() == [22.5, 1]
    assert throughput([[], []]) is None


def test_the_page_is_one_file_with_every_section(run, capsys):
    assert main("--report", "--output_dir", run) == 0
    path = run / "report.html"
    assert capsys.readouterr().out == f"report: {path}\n"
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert re.findall(r'<section id="(\w+)"', page) == SECTIONS
    assert not re.search(r"<(script|link|iframe)|@import|url\(|href=", page)
    images = re.findall(r'src="([^"]*)', page)
    assert len(images) == len(re.findall("src=", page)) == 4
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
    assert "100 tokens of 10 documents in 4 of 4 shards" in text_of(page)
    assert "0.00 GB" not in page  # a small run is told in kB
    assert main("--verify", "--output_dir", run) == 0  # the report is in nobody's way


def with_model(run, root, model):
    """A copy of a run that names this model."""
    shutil.copytree(run, root)
    content = {"model_path": str(model), "dataset_path": "/data/of/somebody.jsonl"}
    edit(root / "metadata.json", lambda told: told.update(configuration=content))
    return root


@pytest.mark.parametrize("known", [True, False])
def test_tokens_are_shown_as_text_with_the_tokenizer_of_the_model(run, tmp_path, known):
    model = tmp_path / "model"
    model.mkdir()
    letters = bytes(range(ord("!"), ord("!") + VOCABULARY)).decode()  # a token is one byte
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    if known:
        tokenizer.save(str(model / "tokenizer.json"))
    root = with_model(run, tmp_path / "run", model)
    page = page_of(root, tmp_path)
    dataset = ActivationDataset(str(run))
    largest = max(dataset, key=lambda one: np.linalg.norm(one[HOOKS[3]], axis=1).max())
    token = int(np.linalg.norm(largest[HOOKS[3]], axis=1).argmax())
    own = int(largest.token_ids[token])
    shown = letters[own] if known else str(own)
    assert f"<mark>{html.escape(shown, quote=True)}</mark>" in page.replace("&#34;", "&quot;")
    assert ("The model's tokenizer is not on this machine" in page) is not known


@pytest.mark.parametrize("positions", ["all", "last"])
def test_cut_documents_are_found_whatever_is_kept_of_them(run, tmp_path, positions):
    root = tmp_path / "run"
    extract(root, identity={"positions": positions}, hook_facts=WIDTHS)
    for number in range(1, 5):
        change_table(root, number, lambda rows: rows[0].update(cut=250))
    text = text_of(page_of(root, tmp_path))
    assert "40% of the sampled documents were cut; 1,000 tokens at their ends were left out" in text
    assert ("lengths are not known" in text) is (positions == "last")
    assert "were cut" not in text_of(page_of(run, tmp_path))


def page_about(folder, hooks):
    """Returns what the page says of hooks: name -> activations (samples, tokens, width)."""
    with ActivationStorage(str(folder / "run"), {name: name for name in hooks}) as s:
        for number, values in enumerate(zip(*hooks.values(), strict=True)):
            for name, each in zip(hooks, values, strict=True):
                s.add_activation(name, each, number, "", np.arange(len(each)), None)
    return text_of(page_of(folder / "run", folder))


NORMAL = np.random.default_rng(0).standard_normal((2, 5, 7, 8)).astype(np.float32)


@pytest.mark.parametrize("value", [0, 1, 1e-30])
def test_hooks_without_a_layer_and_hooks_that_do_not_vary_are_shown(value, tmp_path):
    still = np.full((5, 7, 4), value, np.float32)
    hooks = {"модель.слой.$x^{$": still, "my.layers.3.output": NORMAL[0]}
    text = page_about(tmp_path, hooks)
    assert "other hooks" in text and all(name in text for name in hooks)


def test_an_outlier_dimension_is_named(tmp_path):
    high = np.where(np.arange(8) == 3, np.float32(200), NORMAL[1])
    text = page_about(tmp_path, {"blocks.0.a": NORMAL[0], "blocks.1.a": high})
    named = (
        r"1 of 2 hooks has dimensions with .* at most \d\d\d times \(dimension 3 of blocks.1.a\)"
    )
    assert re.search(named, text) and re.search(r" 3 \(\d\d\d×\)", text)


def test_samples_of_which_no_token_is_kept_are_not_among_the_documents(tmp_path):
    with ActivationStorage(str(tmp_path), {0: "h"}) as storage:
        for number in range(6):
            count = 3 * (number % 2)
            values, ids = np.ones((count, 4), np.float32), np.full(count, number, np.int32)
            storage.add_activation(0, values, number, "", ids, f"id-{number}")
    sample = read_sample(ActivationDataset(tmp_path), ["h"])
    assert [document.doc_id for document in sample.documents] == ["id-1", "id-3", "id-5"]
    assert sample.document.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert sample.token_ids.tolist() == [1] * 3 + [3] * 3 + [5] * 3


@pytest.mark.parametrize("value", [1e30, np.nan])
def test_activations_whose_norms_are_no_usable_numbers_are_refused(value, run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    shard = load(tmp_path / "run", 2)
    shard[3][0]["activation"].fill(value)
    replace_shard(tmp_path / "run", 2, gzip.compress(pickle.dumps(shard, 4)))
    assert main("--report", "--output_dir", tmp_path / "run") == 1
    assert f"sample 3, {HOOKS[3]}: NaN or huge values" in capsys.readouterr().err


def test_a_run_that_goes_on_is_read_from_a_bucket(tmp_path, run, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "shard_0004.json").unlink()
    edit(copy / "metadata.json", lambda content: content.update(status="running", shards=3))
    fsspec.filesystem("memory").put(f"{copy}/", f"memory:/{tmp_path}", recursive=True)
    monkeypatch.chdir(tmp_path)
    assert main("--report", "--output_dir", f"memory:/{tmp_path}") == 0
    page = (tmp_path / "report.html").read_text()
    assert "90 tokens of 9 documents in 3 of 3 shards" in text_of(page)


def test_refusals_are_one_line(tmp_path, run, capsys, monkeypatch):
    def refused(*arguments):
        assert main("--report", *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "holds no extraction" in refused("--output_dir", str(tmp_path))
    assert "a folder that exists" in refused(str(tmp_path / "no/a.html"), "--output_dir", str(run))
    assert "cannot be used together" in refused("--status", "--output_dir", str(run))
    for missing in ("matplotlib", "jinja2"):
        monkeypatch.setattr(report, "find_spec", lambda name, gone=missing: name != gone or None)
        line = refused("--output_dir", str(run))
        assert f"needs {missing};" in line and "pip install -e '.[report]'" in line


@pytest.mark.long
def test_neither_jax_nor_torch_is_needed(tmp_path, run):
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('jax', 'torch', 'transformers'))\n"
        "from activation_extraction.store.folder import Folder\n"
        "from activation_extraction.inspect.report import show_report\n"
        "sys.exit(show_report(Folder(sys.argv[1]), sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(run), str(tmp_path / "a.html")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "a.html").exists()) == (0, True), done.stderr


HOSTILE = "\"><script>evil()</script><img/src=x/onerror=evil()>'<b onclick=evil()>&lt;evil>"
HOSTILE += "\x1b[31m\u202e$x^{$ {{ 7 * 7 }} {% evil %}"
NAMES = {key: f"blocks.{key}.hook{HOSTILE}" for key in HOOKS}


class Page(HTMLParser):
    """Collects elements and attributes."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text = set[str](), [], ""
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
    """Every text of a run is shown as text and nothing else."""
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    for root in (plain, hostile):
        extract(root, hook_facts=WIDTHS)
    edit(hostile / "metadata.json", spoil_metadata)

    def rename(content):
        content["run"] = json.loads((hostile / "metadata.json").read_bytes())["run"]
        for hook in content["hooks"]:
            hook["name"] = NAMES[hook["key"]]

    def rename_in_records(shard):
        for key, records in shard.items():
            for record in records:
                record["hook"] = NAMES[key]

    for number, path in enumerate(sorted(hostile.glob("shard_*.json")), 1):
        change_shard(hostile, number, rename_in_records)
        edit(path, rename)
    expected, found = (Page(page_of(root, tmp_path)) for root in (plain, hostile))
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


# Text whose contrast with its background is below 4.5 (WCAG AA), with the contrast.
CONTRASTS = """(() => {
  const rgba = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => { const [r, g, b] = rgba(color).slice(0, 3).map(v =>
    (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = element => { for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if ((rgba(color)[3] ?? 1) > 0) return color; } return 'rgb(255, 255, 255)'; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(style.color), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${text} ${(a + 0.05) / (b + 0.05)}`);
  }
  return low; })()"""


# Charts that leave room beside them, tables that are cut off, parts of paths that break.
LOOSE = """(() => {
  const right = element => element.getBoundingClientRect().right;
  const charts = [...document.querySelectorAll('.charts')].filter(
    row => right(row) - right(row.lastElementChild) > 2);
  document.querySelectorAll('details').forEach(details => details.open = true);
  const tables = [...document.querySelectorAll('.scroll')].filter(
    box => innerWidth > 1200 && box.scrollWidth > box.clientWidth);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), broken = [];
  while (walker.nextNode()) {
    const range = document.createRange(), text = walker.currentNode;
    if (text.nextSibling?.nodeName !== 'WBR' || /[\\s-]/.test(text.data)) continue;
    range.selectNodeContents(text);
    const lines = new Set([...range.getClientRects()].map(box => box.top));
    if (lines.size > 1) broken.push(text.data);
  }
  return [charts.length, tables.length, broken]; })()"""


MEASURES = f"""({{document, innerWidth, performance}}) => ({{
  low: {CONTRASTS}, loose: {LOOSE}, width: document.documentElement.scrollWidth,
  shown: [...document.images].every(image => image.naturalWidth > 100),
  background: getComputedStyle(document.body).backgroundColor,
  requests: performance.getEntriesByType('resource').map(each => each.name).filter(
    url => !url.startsWith('data:'))}})"""
SCREENS = (390, 1280)  # CSS pixels: a phone, a desk


def shown_by_chromium(page, folder, dark):
    """Returns what MEASURES says of the page on each screen."""
    frame = '<iframe style="width:{}px;height:844px;border:0" srcdoc="{}"></iframe>'
    script = "onload = () => document.body.textContent = JSON.stringify("
    script += f"[...document.querySelectorAll('iframe')].map(f => ({MEASURES})(f.contentWindow)))"
    frames = "".join(frame.format(width, html.escape(page)) for width in SCREENS)
    (folder / "frames.html").write_text(f"<!doctype html>{frames}<script>{script}</script>")
    flags = "--headless --no-sandbox --disable-gpu --dump-dom --no-first-run".split()
    flags += [f"--user-data-dir={folder}", f"--blink-settings=preferredColorScheme={int(not dark)}"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, (folder / "frames.html").as_uri()], capture_output=True, text=True
    )
    (found,) = re.findall("<body>(.*)</body>", done.stdout)
    return json.loads(html.unescape(found))


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_shows_it_well_on_phones_and_desks_in_light_and_dark(tmp_path, run):
    model = "/somebody/folder_of_a_project/models_we_trained/Qwen2.5_0.5B_of_today"
    page = page_of(with_model(run, tmp_path / "run", model), tmp_path)
    backgrounds = set()
    for dark in (False, True):
        found = shown_by_chromium(page, tmp_path, dark)
        for screen, measures in zip(SCREENS, found, strict=True):
            backgrounds.add(measures.pop("background"))
            assert measures.pop("width") <= screen
            assert measures == {"low": [], "loose": [0, 0, []], "shown": True, "requests": []}
    assert len(backgrounds) == 2
