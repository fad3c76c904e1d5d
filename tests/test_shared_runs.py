"""Finished runs on the Hugging Face hub, which are read as on the disk, and their dataset cards."""

import pickle
import shutil
import sys

import datasets
import huggingface_hub
import numpy as np
import pytest
from cloud import free_port
from command_line import assert_refused, main
from extractions import HIDDEN, HOOKS, edit, extract
from hub_server import serve_hub

from activation_extraction import ActivationDataset, ActivationStorage, StorageOptions
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import visible
from activation_extraction.inspect.dataset_card import size_category
from activation_extraction.store import hub_folder
from activation_extraction.store.folder import ANY, Folder, FolderError
from activation_extraction.store.identity import Identity

URL = "hf://datasets/org/run"
WIDTHS = {key: {"width": HIDDEN} for key in HOOKS}
MIB = 2**20


def use_hub(address, monkeypatch):
    """Makes the server at an address the hub of this process."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose file trees have five entries on a page, for a user who has no token."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serve_hub(tmp_path) as server:
        server.page = 5
        use_hub(server.endpoint, monkeypatch)
        yield server


@pytest.fixture
def run(tmp_path):
    """The folder of the data set org/run on the hub, which is a finished run."""
    folder = tmp_path / "datasets/org/run"
    extract(folder, hook_facts=WIDTHS, shard_format="safetensors")
    return folder


def batches_of(dataset, **options):
    """Returns the arrays of all batches of a dataset, one list for each batch."""
    return [
        [
            batch.sample_idx,
            batch.token_ids,
            batch.position,
            *(batch[name] for name in HOOKS.values()),
        ]
        for batch in dataset.batches(16, **options)
    ]


def assert_same(dataset, expected):
    """Asserts that two datasets have the same metadata, samples, statistics and batches."""
    assert dataset.metadata == expected.metadata and dataset.complete
    assert dataset.samples.equals(expected.samples)
    for name in HOOKS.values():
        mean = expected.statistics[name].mean
        np.testing.assert_array_equal(dataset.statistics[name].mean, mean)
    for options in ({}, {"shuffle": 3}):
        batches = batches_of(dataset, **options)
        for arrays, others in zip(batches, batches_of(expected, **options), strict=True):
            for array, other in zip(arrays, others, strict=True):
                np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_a_private_run_is_read_with_the_token_as_on_the_disk(
    shard_format, hub, tmp_path, monkeypatch
):
    """It has two machines, and is in a folder of the repository. The network that delivers the
    files does not get the token, and nothing is stored on this machine."""
    run = tmp_path / "datasets/org/run/layers"
    for machine in range(2):
        extract(run, machine, 0, 2, 1, hook_facts=WIDTHS, shard_format=shard_format)
    (run.parent / "README.md").write_text("# About\n")
    hub.tokens["org/run"] = "hf_mine"
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    files = {*tmp_path.rglob("*")}
    dataset = ActivationDataset(f"{URL}/layers")
    assert_same(dataset, ActivationDataset(run))
    assert main("--verify", "--output_dir", f"{URL}/layers") == 0
    assert hub.authorizations == {"Bearer hf_mine"} and hub.cdn_authorizations == {None}
    assert {*tmp_path.rglob("*")} == files


def test_only_the_bytes_of_the_hook_are_sent(hub, tmp_path):
    """A dataset of several hooks is read by ranges of whole MiB."""
    options = StorageOptions(shard_format="safetensors")
    names = {key: f"blocks.{key}.hook_resid_post" for key in range(4)}
    with ActivationStorage(str(tmp_path / "datasets/org/run"), names, options) as storage:
        values = np.random.default_rng(0).standard_normal((2048, 512), np.float32)
        for key in names:
            storage.add_activation(key, values + key, 0, "", np.arange(2048), 0)
    (batch,) = ActivationDataset(URL, hooks=[names[2]]).batches(2048)
    np.testing.assert_array_equal(batch[names[2]], values + 2)
    # The header and the tensors of tokens take the first MiB. Ranges end where a MiB ends.
    assert 4 * MIB <= hub.sent["shard_0001.safetensors"] <= 6 * MIB


def test_all_that_a_dataset_reads_comes_from_one_commit(hub, run):
    """A commit that is pushed later changes nothing, also in a copy for another process."""
    dataset = ActivationDataset(URL)
    copy = pickle.loads(pickle.dumps(dataset))
    before = shutil.copytree(run, run.with_name("run@before"))
    extract(run, count=20, overwrite=True, hook_facts=WIDTHS, shard_format="pickle")
    expected = ActivationDataset(before)
    assert_same(dataset, expected)
    assert_same(copy, expected)
    assert_same(ActivationDataset(f"{URL}@before"), expected)
    assert_same(ActivationDataset(dataset.url), expected)
    assert len(ActivationDataset(URL)) == 20
    used = {
        path.split("/resolve/")[1].split("/")[0] for path in hub.requests if "/resolve/" in path
    }
    assert len(used) == 2 and all(len(revision) == 40 for revision in used)


MISSING = "the hub has no such data set, or it is private and "
REFUSED = [
    ("hf://datasets/org/none", None, f"{MISSING}HF_TOKEN is not set"),
    (f"{URL}@v9", None, "the data set has no revision v9"),
    ("hf://datasets/org/secret", None, f"{MISSING}HF_TOKEN is not set"),
    ("hf://datasets/org/secret", "hf_other", f"{MISSING}your token (HF_TOKEN) may not read it"),
    (URL, "hf_expired", "the hub does not accept your token (HF_TOKEN)"),
    ("hf://org/run", None, "the hub has no such model, or it is private and HF_TOKEN is not set"),
    (f"{URL}/none", None, "/none: holds no run"),
]


@pytest.mark.parametrize(("url", "token", "reason"), REFUSED)
def test_what_cannot_be_read_is_one_line(url, token, reason, hub, run, monkeypatch, capsys):
    shutil.copytree(run, run.with_name("secret"))
    hub.tokens["org/secret"] = "hf_mine"
    hub.expired.add("hf_expired")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError) as refused:
        ActivationDataset(url)
    message = str(refused.value)
    assert (
        message.startswith(url.removesuffix("/none"))
        and message.endswith(reason)
        and "\n" not in message
    )
    assert main("--status", "--output_dir", url) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_reading_from_the_hub_needs_its_package(hub, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=f"^{URL}: needs huggingface_hub; run: .* install hugg"):
        ActivationDataset(URL)


def test_a_range_is_cut_out_of_the_whole_file_if_it_is_small(hub, run, monkeypatch):
    hub.ignores_ranges = True
    folder = Folder(URL)
    content = (run / "metadata.json").read_bytes()
    assert folder.read_range("metadata.json", 3, 9) == content[3:9]
    monkeypatch.setattr(hub_folder, "MAX_BYTES_WITHOUT_RANGES", 100)
    with pytest.raises(FolderError, match="reading metadata.json: has .* expected at most 100"):
        folder.read_range("metadata.json", 3, 9)


def test_a_model_at_a_url_of_the_hub_is_refused_by_its_flag(hub, tmp_path, capsys):
    assert_refused(
        capsys, tmp_path, ["--model_path", "hf://org/none"], "--model_path hf://org/none: "
    )


def test_a_hub_that_cannot_be_asked_is_one_line(hub, monkeypatch):
    use_hub(f"http://127.0.0.1:{free_port()}", monkeypatch)
    with pytest.raises(ValueError, match=f"^{URL}: opening: the hub cannot be reached .*refused"):
        ActivationDataset(URL)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"^{URL}: opening: HF_HUB_OFFLINE is set"):
        ActivationDataset(URL)


def test_a_hub_that_is_busy_is_asked_again(hub, run, lines):
    hub.failures = 1
    folder = Folder(URL)
    hub.failures = 1
    assert folder.read("metadata.json") == (run / "metadata.json").read_bytes()
    assert folder.num_failed_attempts == 2
    warnings = [line for _, line in lines]
    assert [line.partition(" failed (")[0].partition(": ")[2] for line in warnings] == [
        "opening",
        "reading metadata.json",
    ]


def test_a_folder_on_the_hub_is_only_read(hub, run):
    folder = Folder(URL)
    metadata = (run / "metadata.json").read_bytes()
    assert folder.files() == {path.name: path.stat().st_size for path in run.iterdir()}
    assert folder.head("metadata.json") == (len(metadata), None) and folder.head("x") is None
    for name in ("metadata.json", "shard_0001.safetensors"):  # the second is an LFS file
        content = (run / name).read_bytes()
        assert folder.read(name) == content
        assert folder.read_range(name, 3, 9) == content[3:9]
        assert folder.read_range(name, len(content) - 2, len(content) + 5) == content[-2:]
        assert folder.read_range(name, len(content), len(content) + 5) == b""
    assert folder.read("x") is None and folder.read_range("x", 0, 1) is None
    with pytest.raises(
        FolderError, match="reading metadata.json: has .* bytes, expected at most 9"
    ):
        folder.read("metadata.json", max_bytes=9)
    with pytest.raises(InputError, match=f"{URL}@.*: new cannot be written there; expected a loc"):
        folder.write("new", b"", ANY)


def card_of(run, folder, capsys):
    """Returns the card that --report writes into a folder, and the line that it prints about it."""
    folder.mkdir(exist_ok=True)
    assert main("--report", folder / "page.html", "--output_dir", run) == 0
    printed, errors = capsys.readouterr()
    assert (folder / "page.html").exists() and errors == ""
    content = (folder / "dataset_card.md").read_text()
    return huggingface_hub.DatasetCard(content), printed.splitlines()[1]


def test_the_card_names_the_facts_of_the_run_and_shows_its_samples(tmp_path, capsys):
    """A card that is the README.md makes `datasets` read the tables of samples, as the hub does."""
    run = tmp_path / "run"
    for machine in range(2):
        data = {"identity": {"data": "org/texts small train"}, "shard_size_gb": 1e-3}
        extract(run, machine, 0, 2, 1, count=600, **data)
    flags = {"model_path": "org/tiny", "lora": "/home/me/adapter", "encode": [["", "org/sae"]]}
    model = {"model_type": "qwen2", "num_hidden_layers": 12}
    facts = {"configuration": flags, "model_commit": "a" * 40, "model": model}
    for machine in range(2):
        edit(run / f"machine_00{machine}/metadata.json", lambda content: content.update(facts))
    card, line = card_of(run, run, capsys)
    assert line.endswith("dataset_card.md; to share the run on the hub, rename it to README.md")
    assert card.data.to_dict() == {
        "base_model": "org/tiny",
        "size_categories": "1K<n<10K",
        "tags": ["activations", "interpretability", "tiny"],
        "configs": [{"config_name": "samples", "data_files": "**/*.samples.parquet"}],
    }
    text = card.text
    assert "# Activations of `tiny`\n" in text
    assert f"`org/tiny` at commit `{'a' * 40}`. It is a `qwen2` model of 12 layers." in text
    assert "The LoRA adapter `adapter` was" in text and "Autoencoders: `org/sae`." in text
    assert f"`org/texts small train` at commit `{'1' * 64}`. A sample is one row, cut to" in text
    assert "| `blocks.3.hook_resid_post` | 16 | float32 |" in text
    size = sum(path.stat().st_size for path in run.glob("*/*.pkl.gz")) / 1e6
    assert f"12,000 tokens of 1,200 samples, in 2 shards ({size:.1f} MB)." in text
    assert "Format 5 of activation-extraction, in gzipped pickles (a dict" in text
    assert 'dataset = ActivationDataset("hf://datasets/ORG/NAME")' in text and "/home" not in text
    assert text.index("README.md") < text.index("# Activations")
    (run / "dataset_card.md").rename(run / "README.md")
    table = datasets.load_dataset(str(run), cache_dir=str(tmp_path / "cache"), split="train")
    assert table["sample_idx"] == [*range(0, 1200, 2), *range(1, 1200, 2)]


def test_a_mixture_is_named_without_paths_of_the_machine(tmp_path, capsys):
    sources = [["org/texts:small:train", 3.0], ["/home/me/own.jsonl", 1.0]]
    identity = {"data": "a mixture", "data_revision": "org/texts:small:train@abc"}
    extract(tmp_path, identity=identity)
    facts = {"configuration": {"mix": sources, "model_path": "/home/me/models/tiny"}}
    edit(tmp_path / "metadata.json", lambda content: content.update(facts))
    card, _ = card_of(tmp_path, tmp_path, capsys)
    mixture = "`org/texts:small:train` at commit `abc` (weight 3), `own.jsonl` (weight 1)"
    assert f"A mixture of {mixture}." in card.text and "/home" not in card.content
    assert "`tiny`, from a folder of the author." in card.text
    assert "base_model" not in card.data.to_dict() and "tiny" in card.data.tags


def test_the_card_of_a_program_with_a_loop_of_its_own_names_no_model(tmp_path, capsys):
    with ActivationStorage(str(tmp_path / "run"), {"third": "layers.3|a`b"}) as storage:
        values = np.ones((20, 8), np.float32)
        storage.add_activation("third", values, 0, "a text", np.arange(20), 0)
    card, _ = card_of(tmp_path / "run", tmp_path, capsys)
    assert card.data.tags == ["activations", "interpretability"]
    assert "The metadata of the run does not name the model.\n" in card.text
    assert "A program with a loop of its own has stored the samples.\n" in card.text
    assert "| `layers.3\\|a'b` | 8 | float32 |" in card.text


def test_the_card_says_how_float8_is_stored_and_read(tmp_path, capsys):
    options = StorageOptions(shard_format="safetensors")
    identity = Identity(activation_dtype="float8", storage=options)
    with ActivationStorage(str(tmp_path / "run"), {0: "h"}, options, identity) as storage:
        storage.add_activation(0, np.ones((20, 8), np.float32), 0, "", np.arange(20))
    card, _ = card_of(tmp_path / "run", tmp_path, capsys)
    assert "| `h` | 8 | float8 (e4m3), read as float32 |" in card.text


def test_a_hostile_name_stays_text(run, tmp_path, capsys):
    """It ends neither the YAML nor the code in which Markdown shows it."""
    name = 'org/"x`<img src=x>|\n---\n# {{ 7 * 7 }}: &a\x1b[31m\u202e'
    facts = {"configuration": {"model_path": name}, "model_commit": "a" * 40}
    edit(run / "metadata.json", lambda content: content.update(facts))
    card, _ = card_of(run, tmp_path, capsys)
    assert card.data.base_model == visible(name)
    assert card.text.count("\n# ") == 1
    shown = visible(name).replace("`", "'").replace("|", "\\|")
    assert f"`{shown}` at commit" in card.text


def test_only_a_card_that_nobody_has_edited_is_replaced(run, tmp_path, capsys):
    path = tmp_path / "dataset_card.md"
    card_of(run, tmp_path, capsys)
    first = path.read_text()
    extract(run, count=20, overwrite=True, hook_facts=WIDTHS)
    card_of(run, tmp_path, capsys)
    assert "of 20 samples" in path.read_text() != first
    for content in (path.read_text().replace("20 samples", "many"), "# About my data\n", ""):
        path.write_text(content)
        assert main("--report", tmp_path / "page.html", "--output_dir", run) == 0
        line = capsys.readouterr().out.splitlines()[1]
        assert line == f"dataset card: {path} has been edited or is no card; it is left as it is"
        assert path.read_text() == content


@pytest.mark.parametrize(
    ("samples", "category"),
    [(1, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**11, "100B<n<1T"), (10**12, "n>1T")],
)
def test_the_hub_s_categories_of_size(samples, category):
    assert size_category(samples) == category
