"""--report: its numbers against NumPy, and what the page holds."""

import html
import re
import shutil
from base64 import b64decode

import numpy as np
import pytest
from command_line import main
from conftest import inputs_with
from extractions import HIDDEN, HOOKS, TOKENS, VOCABULARY, change_shard, change_table, edit, extract
from model_tokenizers import as_two_files, with_settings
from tokenizers import Tokenizer, decoders, models

from activation_extraction import ActivationDataset, ActivationStorage
from activation_extraction.dataset.features import find_decoder
from activation_extraction.inspect import report
from activation_extraction.inspect.report_numbers import HookReport, select_tokens
from activation_extraction.run.demo import MODEL_CONFIG
from activation_extraction.store.folder import Folder

NEEDED = "needs tokenizer.json, or vocab.json and merges.txt, of "
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
    dataset = ActivationDataset(run)
    selection = select_tokens(dataset, list(dataset.hooks))
    assert list(selection.position_ranges) == [0, 1, 2, 3, 4, 8]
    for number, name in enumerate(HOOKS.values()):
        hook_report = HookReport(selection, number, name)
        activations = np.concatenate([one[name] for one in dataset]).astype(np.float64)
        norms = np.linalg.norm(activations, axis=1)
        expected = np.quantile(norms, [0.01, 0.25, 0.5, 0.75, 0.99, 1])
        np.testing.assert_allclose(hook_report.norm_quantiles, expected, rtol=1e-5)
        assert (
            hook_report.equal_tokens_with_largest_norms[0].index_of_largest_norm == norms.argmax()
        )
        fours = norms.reshape(-1, TOKENS)[:, 4:8]
        assert hook_report.median_norms_of_position_ranges[4] == pytest.approx(
            np.median(fours), rel=1e-5
        )


def test_the_page_is_one_file_with_every_section(run, capsys):
    assert main("--report", "--output_dir", run) == 0
    path = run / "report.html"
    page_line, card_line = capsys.readouterr().out.splitlines()
    assert page_line == f"report: {path}"
    assert card_line.startswith(f"dataset card: {run / 'dataset_card.md'}; to share the run")
    page = path.read_text()
    assert re.findall(r'<section id="(\w+)"', page) == ["glance", "norms", "tokens", "speed"]
    assert not re.search(r"<(script|link|iframe)|@import|url\(|href=", page)
    images = re.findall(r'src="([^"]*)', page)
    assert len(images) == len(re.findall("src=", page)) == 4
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
    assert "100 tokens of 10 documents in 4 of 4 shards" in text_of(page)
    assert "0.00 GB" not in page  # a small run is told in kB
    assert main("--verify", "--output_dir", run) == 0  # the report is in nobody's way


def test_tokens_are_shown_as_text_with_the_tokenizer_of_the_model(run, tmp_path):
    largest = max(ActivationDataset(run), key=lambda s: np.linalg.norm(s[HOOKS[3]], axis=1).max())
    own = int(largest.token_ids[np.linalg.norm(largest[HOOKS[3]], axis=1).argmax()])
    page = page_of(run, tmp_path)
    assert f"<mark>{own}</mark>" in page
    assert "their text needs the name of the model, which metadata.json lacks" in text_of(page)
    letters = bytes(range(ord("!"), ord("!") + VOCABULARY)).decode()  # a token is one byte
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    root = shutil.copytree(run, tmp_path / "run")
    names = {"model_path": str(tmp_path), "dataset_path": "/data/of/somebody.jsonl"}
    edit(root / "metadata.json", lambda content: content.update(configuration=names))
    page = page_of(root, tmp_path)
    shown = html.escape(letters[own], quote=True)
    assert f"<mark>{shown}</mark>" in page.replace("&#34;", "&quot;")
    assert NEEDED not in page


@pytest.mark.parametrize("form", [lambda model: None, as_two_files], ids=["whole", "two files"])
def test_text_is_shown_with_what_the_run_read(form, demo_inputs, texts, tmp_path):
    """A token may stand beside the vocabulary, and an id may have no token."""
    model, said = tmp_path / "model", [" a word<|mine|>é🙂<|endoftext|>", "one more<|mine|> time"]
    inputs_with({**MODEL_CONFIG, "vocab_size": 2064}, demo_inputs, tmp_path)
    form(model)
    with_settings(model, {"extra_special_tokens": ["<|mine|>"]})
    flags = ["--model_path", model, "--layers_to_extract", 1, "--output_dir", tmp_path / "out"]
    rows = [{"text": text} for text in said]
    assert main(*flags, "--dataset_path", texts(rows)) == 0
    dataset = ActivationDataset(tmp_path / "out")
    decode = find_decoder(dataset)
    assert [decode(sample.token_ids) for sample in dataset] == said
    one = dataset[0].token_ids[:1]
    assert decode(np.array([*one, 2063, -1, *one])) == f"{decode(one)}[2063][-1]{decode(one)}"
    assert "&lt;|mine|&gt;" in page_of(tmp_path / "out", tmp_path)
    for path in (model / "merges.txt", model / "tokenizer.json"):
        path.unlink(missing_ok=True)
    told = f"{NEEDED}{model} on this machine"
    with pytest.raises(LookupError, match=f"^{told}$"):
        find_decoder(dataset)
    page = text_of(page_of(tmp_path / "out", tmp_path))
    assert f"These are token ids; their text {told}." in page


def test_cut_documents_are_found_whatever_is_kept_of_them(tmp_path):
    root = tmp_path / "run"
    extract(root, identity={"positions": "last"}, hook_facts=WIDTHS)
    for number in range(1, 5):
        change_table(root, number, lambda rows: rows[0].update(cut=250))
    text = text_of(page_of(root, tmp_path))
    assert "40% of the sampled documents were cut; 1,000 tokens at their ends were left out" in text
    assert "lengths are not known" in text


def row_of(page, name):
    """The cells of a hook in the page's table."""
    table, _, _ = page.partition("</tbody>")
    rows = ([text_of(cell) for cell in row.split("<td>")[1:]] for row in table.split("<tr>"))
    return next(cells for cells in rows if cells[:1] == [name])


def test_the_table_says_what_numpy_computes(tmp_path):
    """First tokens of documents would hide the dimensions of others."""
    vectors = np.random.default_rng(0).standard_normal((5, 100, 8)).astype(np.float32)
    vectors *= [1, 1, 1, 1, 1, 20, 1, 0]
    vectors[..., 2] -= 50
    vectors[0, 0, 4] = 1e5
    vectors[3, 9, 2] *= 6  # no outlier
    with ActivationStorage(str(tmp_path / "run"), {0: "blocks.1.a", 1: "zeros"}) as storage:
        for number, each in enumerate(vectors):
            for key, values in enumerate((each, each * 0)):
                storage.add_activation(key, values, number, "", np.arange(100), number)
    page = page_of(tmp_path / "run", tmp_path)
    exact = vectors.astype(np.float64)
    norms, size = np.linalg.norm(exact, axis=2), np.sqrt(np.square(exact[:, 1:]).mean((0, 1)))
    ratio, (low, median, high) = size / np.median(size), np.quantile(norms, [0.01, 0.5, 0.99])
    numbers = [norms.mean(), exact.std(), median]
    assert row_of(page, "blocks.1.a") == [
        "blocks.1.a",
        *(f"{number:.4g}" for number in numbers),
        f"{low:.4g} – {high:.4g}",
        f"{norms.max():.4g}",
        f"{1 / 500:.2%}",
        f"2 ({ratio[2]:.3g}×)5 ({ratio[5]:.3g}×)",
    ]
    assert row_of(page, "zeros")[-1] == ""
    assert f"at most {ratio[2]:.3g} times (dimension 2 of blocks.1.a)" in text_of(page)


@pytest.mark.parametrize("value", [1e30, np.nan])
def test_activations_whose_norms_are_no_usable_numbers_are_refused(value, run, tmp_path, capsys):
    root = shutil.copytree(run, tmp_path / "run")
    change_shard(root, 2, lambda shard: shard[3][0]["activation"].fill(value))
    assert main("--report", "--output_dir", root) == 1
    assert f"sample 3, {HOOKS[3]}: NaN or huge values" in capsys.readouterr().err


def test_refusals_are_one_line(tmp_path, run, capsys, monkeypatch):
    for arguments, told, gone in (
        (["--output_dir", tmp_path], "holds no run", None),
        ([tmp_path / "no/a.html", "--output_dir", run], "a folder that exists", None),
        (["--output_dir", run], "needs jinja2; in the folder", "jinja2"),
    ):
        monkeypatch.setattr(report, "find_spec", lambda name, gone=gone: name != gone or None)
        assert main("--report", *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line


HOSTILE = "\"><script>evil()</script><img/src=x/onerror=evil()>'<b onclick=evil()>&lt;evil>"
HOSTILE += "\x1b[31m\u202e$x^{$ {{ 7 * 7 }} {% evil %}"
NAMES = {key: f"blocks.{key}.hook{HOSTILE}" for key in HOOKS}


def spoil_metadata(content):
    configuration = dict.fromkeys(("model_path", "dataset_path", "bucket_url"), HOSTILE)
    content |= {"configuration": configuration, "model_commit": HOSTILE, "status": HOSTILE}
    content["identity"] |= dict.fromkeys(("text_column", "data", "dtype"), HOSTILE)
    for hook in content["hooks"]:
        hook["name"] = NAMES[hook["key"]]


def test_nothing_that_was_stored_becomes_a_part_of_the_page(tmp_path):
    """Every text of a run is shown as text and nothing else."""
    root = tmp_path / "run"
    extract(root, hook_facts=WIDTHS)
    edit(root / "metadata.json", spoil_metadata)
    for number in range(1, 5):
        change_table(root, number, lambda rows: [r.update(doc_id=HOSTILE) for r in rows])
    page = page_of(root, tmp_path)
    assert page.count("evil()") > 10 and "{{ 7 * 7 }}" in page
    raw = ("<script", "<img/src", "<b onclick", "<evil", '">&lt;script', "\x1b", "\u202e")
    assert [each for each in raw if each in page] == []
    images = re.findall(r'src="([^"]*)', page)
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
    assert not any(b"evil" in b64decode(image.partition(",")[2]) for image in images)
