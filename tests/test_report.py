"""--report: its numbers against NumPy, what the page holds, and how Chromium shows it."""

import html
import json
import re
import shutil
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from browser import CHROMIUM, chromium
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
)
from tokenizers import Tokenizer, decoders, models

from activation_extraction import ActivationStorage
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect import report
from activation_extraction.inspect.report_numbers import (
    SHARES,
    TokenSample,
    analyse,
    choose_samples,
    intervals,
    position_buckets,
    read_sample,
    throughput,
    variance_shares,
)
from activation_extraction.store.folder import Folder

SECTIONS = ["glance", "run", "norms", "directions", "tokens", "speed"]
WIDTHS = {key: {"width": HIDDEN} for key in HOOKS}
LINES = [
    {"time": 1010.0, "tokens": 100, "steps": 1, "tokens_per_second": 10.0},
    {"time": 1020.0, "tokens": 300, "steps": 2, "tokens_per_second": 20.0},
    {"time": 1050.0, "tokens": 100, "steps": 1, "tokens_per_second": 10.0},  # started again
]


METRICS = "\n".join([*map(json.dumps, LINES), '{"time": 10'])  # the last one is being written


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    extract(root, hook_facts=WIDTHS)
    (root / "metrics.jsonl").write_text(METRICS)
    return root


def commits_of(root):
    folders = read_folders(Folder(str(root)))
    return [commit for stored in folders.values() for commit in stored.in_order]


def page_of(root, target):
    """The page about a run."""
    assert report.show_report(Folder(str(root)), str(target / "report.html")) == 0
    return (target / "report.html").read_text()


def text_of(page):
    """What the page says, in one line."""
    return " ".join(re.sub(r"<style>.*</style>|<[^>]*>", "", page, flags=re.DOTALL).split())


def test_the_numbers_are_those_that_numpy_gives(run):
    dataset = ActivationDataset(str(run))
    sample = read_sample(dataset, commits_of(run), list(dataset.hooks))
    buckets = position_buckets(sample.position)
    assert list(buckets) == [0, 1, 2, 3, 4, 8]
    for number, (key, name) in enumerate(HOOKS.items()):
        found = analyse(sample, number, name, buckets)
        records = [record for number in range(1, 5) for record in load(run, number)[key]]
        every = np.concatenate([record["activation"] for record in records]).astype(np.float64)
        norms = np.linalg.norm(every, axis=1)
        expected = np.quantile(norms, [0.01, 0.25, 0.5, 0.75, 0.99, 1])
        np.testing.assert_allclose(found.norms, expected, rtol=1e-5)
        assert found.largest[0][0] == norms.argmax()
        fours = norms.reshape(-1, TOKENS)[:, 4:8]
        assert found.by_position[4] == pytest.approx(np.median(fours), rel=1e-5)
        squares = np.linalg.svd(every - every.mean(axis=0), compute_uv=False) ** 2
        np.testing.assert_allclose(found.shares, squares / squares.sum(), rtol=1e-3)
        np.testing.assert_allclose(found.variance, every.var(axis=0), rtol=1e-3)
        needed = [(np.cumsum(squares) < share * squares.sum()).sum() + 1 for share in SHARES]
        assert found.directions.tolist() == needed


def sample_of(vectors, token_ids=None, position=None):
    """A sample of one document whose activations are these, at the only hook `h`."""
    count = len(vectors)
    return TokenSample(
        [],
        np.zeros(count, int),
        np.zeros(count, np.int32) if token_ids is None else token_ids,
        np.arange(count, dtype=np.int32) if position is None else position,
        {"h": np.linalg.norm(vectors.astype(np.float64), axis=1)},
        np.arange(count),
        {"h": vectors},
        1,
    )


def test_outliers_do_not_hide_the_other_directions():
    vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    vectors[:, 5] = 0
    alone = variance_shares(np.delete(vectors, 3, axis=0))
    vectors[3] = 1000
    found = analyse(sample_of(vectors), 0, "h", {})
    np.testing.assert_allclose(found.shares, alone, rtol=1e-4)
    assert found.outlier.nonzero()[0].tolist() == [3]
    assert (found.variance == 0).nonzero()[0].tolist() == [5]
    assert not analyse(sample_of(np.ones((9, 4), np.float32)), 0, "h", {}).shares.size


def test_the_largest_tokens_are_grouped_by_id_and_position():
    vectors = np.array([[9], [8], [7], [6], [5]], np.float32)
    sample = sample_of(vectors, np.array([4, 2, 4, 4, 2]), np.array([0, 1, 2, 0, 4]))
    assert analyse(sample, 0, "h", {}).largest == [(0, 2), (1, 2), (2, 1)]


def test_the_neighbours_of_a_token_end_with_its_document_and_where_a_token_was_not_kept():
    sample = sample_of(np.ones((9, 1), np.float32), position=np.array([0, 1, 2, 0, 1, 3, 4, 5, 6]))
    sample.document[3:] = 1
    found = [sample.around(token, 2) for token in (1, 3, 6, 8)]
    assert found == [slice(0, 3), slice(3, 5), slice(5, 9), slice(6, 9)]


def test_a_sample_is_spread_over_shards_and_stays_within_its_budget(run):
    chosen = choose_samples(commits_of(run), [0, 3], 4 * TOKENS)
    assert len(chosen) == 3 and set(chosen[:2]) <= {0, 1, 2} and chosen[2] == 9


def test_throughput_leaves_out_the_time_in_which_nothing_ran():
    found = intervals(METRICS.encode())
    assert found == [(1000, 1010, 100), (1010, 1020, 200), (1040, 1050, 100)]
    edges, rates, pauses, paused = throughput(found * 2)
    np.testing.assert_allclose(rates, [20, 40, 20])
    np.testing.assert_allclose(edges, range(0, 40, 10))
    assert (pauses.tolist(), paused) == ([20], 20)
    assert throughput([]) is None


def test_a_pause_of_the_run_does_not_squeeze_the_throughput():
    """A day of work before a pause of a month, and one after it."""
    day, month = 86400.0, 30 * 86400.0
    before = [(t, t + 3600, 3600.0) for t in np.arange(0, day, 3600)]
    after = [(start + month, stop + month, tokens) for start, stop, tokens in before]
    edges, rates, pauses, paused = throughput(before + after)
    assert (edges[-1], len(rates), pauses.tolist(), paused) == (2 * day, 48, [day], month - day)
    np.testing.assert_allclose(rates, 1)


def test_the_page_is_one_file_with_every_section(run, capsys):
    assert main("--report", "--output_dir", run) == 0
    path = run / "report.html"
    assert capsys.readouterr().out == f"report: {path}\n"
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert re.findall(r'<section id="(\w+)"', page) == SECTIONS
    assert not re.search(r"<(script|link|iframe)|@import|url\(|href=", page)
    images = re.findall(r'src="([^"]*)', page)
    assert len(images) == len(re.findall("src=", page)) == 6
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
    assert "100 tokens of 10 documents in 4 of 4 shards" in text_of(page)
    assert main("--verify", "--output_dir", run) == 0  # the report is in nobody's way


def test_totals_of_a_small_run_are_not_zero(run, tmp_path):
    stored = sum(commit.bytes for commit in commits_of(run))
    text = text_of(page_of(run, tmp_path))
    assert f"stored{stored / 1000:.1f} kB" in text and "0.00 GB" not in text


def with_model(run, root, model):
    """A copy of a run that names this model."""
    shutil.copytree(run, root)
    content = {"model_path": str(model), "dataset_path": "/data/of/somebody.jsonl"}
    edit(root / "metadata.json", lambda told: told.update(configuration=content))
    return root


def test_a_path_may_break_after_its_slashes_alone(run, tmp_path):
    page = page_of(with_model(run, tmp_path / "run", "/models/Qwen2.5-0.5B"), tmp_path)
    assert "/<wbr>models/<wbr>Qwen2.5-0.5B<wbr>" in page
    assert "/<wbr>data/<wbr>of/<wbr>somebody.jsonl<wbr>" in page
    assert "Activations of /models/Qwen2.5-0.5B" in text_of(page)


@pytest.mark.parametrize("files", [["tokenizer.json"], ["vocab.json", "merges.txt"], []])
def test_tokens_are_shown_as_text_with_either_form_of_a_tokenizer(run, tmp_path, files):
    model = tmp_path / "model"
    model.mkdir()
    letters = bytes(range(ord("!"), ord("!") + VOCABULARY)).decode()  # a token is one byte
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    tokenizer.model.save(str(model))
    for path in list(model.iterdir()):
        if path.name not in files:
            path.unlink()
    root = with_model(run, tmp_path / "run", model)
    page = page_of(root, tmp_path)
    dataset = ActivationDataset(str(run))
    largest = max(dataset, key=lambda one: np.linalg.norm(one[HOOKS[3]], axis=1).max())
    token = int(np.linalg.norm(largest[HOOKS[3]], axis=1).argmax())
    own = int(largest.token_ids[token])
    shown = letters[own] if files else str(own)
    assert f"<mark>{html.escape(shown, quote=True)}</mark>" in page.replace("&#34;", "&quot;")
    assert ("The model's tokenizer is not on this machine" in page) is not (files != [])


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


@pytest.mark.parametrize("value", [0, 1, 1e-30])
def test_hooks_without_a_layer_and_hooks_that_do_not_vary_have_a_page(value, tmp_path):
    chance = np.random.default_rng(0)
    names = {"still": "модель.слой.$x^{$", "varying": "my.layers.3.output"}
    with ActivationStorage(str(tmp_path / "run"), names) as storage:
        for number in range(5):
            values = np.full((7, 4), value, np.float32)
            token_ids = np.arange(7, dtype=np.int32)
            storage.add_activation("still", values, number, "", token_ids, None)
            values = chance.standard_normal((7, 4)).astype(np.float32)
            storage.add_activation("varying", values, number, "", token_ids, None)
    text = text_of(page_of(tmp_path / "run", tmp_path))
    assert f"These hooks do not vary in the sample: {names['still']}." in text
    assert "other hooks" in text and names["varying"] in text


def test_activations_whose_norms_are_no_usable_numbers_are_refused(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    change_shard(tmp_path / "run", 2, lambda shard: shard[3][0]["activation"].fill(1e30))
    assert main("--report", "--output_dir", tmp_path / "run") == 1
    assert f"sample 3, {HOOKS[3]}: NaN or huge values" in capsys.readouterr().err


def test_a_run_that_goes_on_is_read_from_a_bucket(tmp_path, run, monkeypatch):
    fs = fsspec.filesystem("memory")
    for path in run.iterdir():
        fs.pipe(f"/report-run/{path.name}", path.read_bytes())
    fs.rm("/report-run/shard_0004.json")
    copied = tmp_path / "metadata.json"
    copied.write_bytes((run / "metadata.json").read_bytes())
    edit(copied, lambda content: content.update(status="running", shards=3))
    fs.pipe("/report-run/metadata.json", copied.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert main("--report", "--output_dir", "memory://report-run") == 0
    assert "90 tokens of 9 documents in 3 of 3 shards" in text_of(
        (tmp_path / "report.html").read_text()
    )


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


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_shows_it_well_on_phones_and_desks_in_light_and_dark(tmp_path, run):
    model = "/somebody/folder_of_a_project/models_we_trained/Qwen2.5_0.5B_of_today"
    root, path = with_model(run, tmp_path / "run", model), tmp_path / "report.html"
    page_of(root, tmp_path)
    with chromium() as browser:
        backgrounds = set()
        for width, dark in ((390, False), (390, True), (1280, False), (1280, True)):
            browser.open(path, width, dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(CONTRASTS) == []
            assert browser.evaluate(LOOSE) == [0, 0, []]
            images = "[...document.images].every(image => image.naturalWidth > 100)"
            assert browser.evaluate(images)
            backgrounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            said = [event["method"] for event in browser.events]
            assert "Log.entryAdded" not in said and "Runtime.consoleAPICalled" not in said
            sent = [e for e in browser.events if e["method"] == "Network.requestWillBeSent"]
            urls = [event["params"]["request"]["url"] for event in sent]
            assert [url for url in urls if not url.startswith("data:")] == [path.as_uri()]
        assert len(backgrounds) == 2
