"""--report: its numbers against NumPy, what the page holds, and how Chromium shows it."""

import json
import re
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from browser import CHROMIUM, chromium
from cloud import REPOSITORY
from extractions import HIDDEN, HOOKS, TOKENS, edit, extract, load

from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect import report
from activation_extraction.inspect.report_analysis import (
    analyse,
    directions_of,
    largest_tokens,
    position_buckets,
)
from activation_extraction.inspect.report_run import intervals, padding, throughput
from activation_extraction.inspect.report_sample import choose_samples, read_sample
from activation_extraction.store.folder import Folder
from extract_activations import main

SECTIONS = ("glance", "run", "norms", "directions", "tokens", "lengths", "throughput")
WIDTHS = {key: {"width": HIDDEN} for key in HOOKS}
LINES = [
    {"time": 1010.0, "tokens": 100, "steps": 1, "tokens_per_second": 10.0},
    {"time": 1020.0, "tokens": 300, "steps": 2, "tokens_per_second": 20.0},
    {"time": 1050.0, "tokens": 100, "steps": 1, "tokens_per_second": 10.0},  # started again
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    extract(root, hook_facts=WIDTHS)
    lines = [*map(json.dumps, LINES), '{"time": 10']  # the last one is being written
    (root / "metrics.jsonl").write_text("\n".join(lines))
    return root


def commits_of(root):
    return [
        commit for stored in read_folders(Folder(str(root))).values() for commit in stored.in_order
    ]


def report_of(root):
    sample = read_sample(ActivationDataset(str(root)), commits_of(root))
    return sample, analyse(sample, ActivationDataset(str(root)).hooks)


def test_the_numbers_are_those_that_numpy_gives(run):
    sample, hooks = report_of(run)
    for key, found in zip(HOOKS, hooks, strict=True):
        records = [record for number in range(1, 5) for record in load(run, number)[key]]
        every = np.concatenate([record["activation"] for record in records]).astype(np.float64)
        norms = np.linalg.norm(every, axis=1)
        expected = np.quantile(norms, [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99])
        np.testing.assert_allclose(found.norms.levels, expected, rtol=1e-5)
        assert found.norms.largest == pytest.approx(norms.max(), rel=1e-5)
        assert found.largest[0].token == norms.argmax()
        fours = norms.reshape(-1, TOKENS)[:, 4:8]
        assert found.positions[4].median == pytest.approx(np.median(fours), rel=1e-5)
        squares = np.linalg.svd(every - every.mean(axis=0), compute_uv=False) ** 2
        np.testing.assert_allclose(found.directions.shares, squares / squares.sum(), rtol=1e-3)
        assert found.directions.effective == pytest.approx(
            squares.sum() ** 2 / np.square(squares).sum(), rel=1e-3
        )
    assert [bucket.label for bucket in position_buckets(sample.position)] == [
        *("0", "1", "2", "3", "4–7", "8–15")
    ]
    assert sample.document_of(TOKENS).start == TOKENS and sample.document_of(TOKENS - 1).start == 0


def test_outliers_do_not_hide_the_other_directions():
    vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    vectors[:, 5] = 0
    sink = np.zeros(500, bool)
    sink[3] = True
    alone = directions_of(vectors[~sink], sink[~sink])
    vectors[3] = 1000
    found = directions_of(vectors, sink)
    np.testing.assert_allclose(found.shares, alone.shares, rtol=1e-4)
    assert found.outlier_share > 0.99 and found.constant == 1
    assert found.needed(1.0) == 7 and found.needed(found.shares[0]) == 1
    assert directions_of(np.ones((9, 4), np.float32), np.zeros(9, bool)) is None


def test_the_largest_tokens_are_grouped_by_id_and_position():
    norms = np.array([9, 8, 7, 6, 5], np.float32)
    found = largest_tokens(norms, np.array([4, 2, 4, 4, 2]), np.array([1, 0, 0, 1, 0], bool))
    assert [(large.token, large.count, large.first) for large in found] == [
        *((0, 2, True), (1, 2, False), (2, 1, False))
    ]


def test_a_sample_is_spread_over_shards_and_stays_within_its_budget(run):
    commits = commits_of(run)
    chosen = choose_samples(commits, [0, 3], 4 * TOKENS)
    assert [len(numbers) for numbers in chosen.values()] == [2, 1]  # the last shard has one
    assert set(chosen[0]) <= {0, 1, 2} and chosen[3] == [9]


def test_throughput_leaves_out_the_time_in_which_nothing_ran():
    found = intervals(LINES)
    assert [(i.start, i.stop, i.tokens) for i in found] == [
        *((1000, 1010, 100), (1010, 1020, 200), (1040, 1050, 100))
    ]
    both = throughput([found, found], bins=5)
    np.testing.assert_allclose(both.tokens_per_second, [20, 40, 0, 0, 20])
    np.testing.assert_allclose(both.edges * 3600, range(0, 60, 10))
    assert throughput([[]]) is None
    assert padding(LINES, slots=125) == pytest.approx(0.2) and padding([], 125) is None


def test_the_page_is_one_file_with_every_section(run, capsys):
    assert main(["--report", "--output_dir", str(run)]) == 0
    path = run / "report.html"
    assert capsys.readouterr().out == f"report: {path}\n"
    html = path.read_text()
    assert re.findall(r'<section id="(\w+)"', html) == list(SECTIONS)
    assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)|src=", html)
    assert all(link.startswith("#") for link in re.findall(r'href="([^"]*)', html))
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) and html.count("<svg") == 7
    assert "100 tokens of 10 documents in 4 of 4 shards" in html
    assert main(["--verify", "--output_dir", str(run)]) == 0  # the report is in nobody's way


def test_texts_of_documents_cannot_become_html(tmp_path, run):
    sample, hooks = report_of(run)
    sample.documents[:] = [
        type(one)(one.sample_idx, "<script>", "<b>&", one.start, one.stop)
        for one in sample.documents
    ]
    html = "".join(report_page(sample, hooks))
    assert "<script>" not in html and "&lt;script&gt;" in html and "&lt;b&gt;&amp;" in html


def report_page(sample, hooks):
    """The list of the largest tokens of a page."""
    from activation_extraction.inspect.report_page import Content, _token_items

    content = Content(None, sample, [], hooks, {}, None, None, None)
    return [item for hook in hooks for item in _token_items(content, hook)]


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
    assert main(["--report", "--output_dir", "memory://report-run"]) == 0
    html = (tmp_path / "report.html").read_text()
    assert "90 tokens of 9 documents in 3 of 3 shards" in html


def test_refusals_are_one_line(tmp_path, run, capsys, monkeypatch):
    def refused(*arguments):
        assert main(["--report", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "holds no extraction" in refused("--output_dir", str(tmp_path))
    assert "a folder that exists" in refused(str(tmp_path / "no/a.html"), "--output_dir", str(run))
    assert "cannot be used together" in refused("--status", "--output_dir", str(run))
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert "pip install '.[report]'" in refused("--output_dir", str(run))


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
    const own = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(own), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${text} ${(a + 0.05) / (b + 0.05)}`);
  }
  return low; })()"""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_shows_it_well_on_phones_and_desks_in_light_and_dark(tmp_path, run):
    path = tmp_path / "report.html"
    assert report.show_report(Folder(str(run)), str(path)) == 0
    with chromium() as browser:
        backgrounds = set()
        for width, dark in ((390, False), (390, True), (1280, False), (1280, True)):
            browser.open(path, width, dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(CONTRASTS) == []
            backgrounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            said = [event["method"] for event in browser.events]
            assert "Log.entryAdded" not in said and "Runtime.consoleAPICalled" not in said
            assert said.count("Network.requestWillBeSent") == 1  # the page itself
        assert len(backgrounds) == 2
