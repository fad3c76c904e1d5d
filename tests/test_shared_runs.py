"""Finished runs on the Hugging Face hub, which are read as they are on the disk."""

import pickle
import shutil

import huggingface_hub
import numpy as np
import pytest
from cloud import free_port
from command_line import main
from extractions import HIDDEN, HOOKS, extract
from hub_server import serve_hub

from activation_extraction import ActivationDataset, ActivationStorage, StorageOptions
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError
from activation_extraction.store.folder import ANY, Folder, FolderError

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
    ("hf://org/run", None, "the hub has no such model, or it is private and HF_TOKEN is not set"),
    (f"{URL}/none", None, "/none: holds no run"),
]


@pytest.mark.parametrize(("url", "token", "reason"), REFUSED)
def test_what_cannot_be_read_is_one_line(url, token, reason, hub, run, monkeypatch, capsys):
    shutil.copytree(run, run.with_name("secret"))
    hub.tokens["org/secret"] = "hf_mine"
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
    assert folder.retries == 2
    warnings = [line for _, line in lines]
    assert [line.partition(" failed (")[0].partition(": ")[2] for line in warnings] == [
        "opening",
        "reading metadata.json",
    ]


def test_a_folder_on_the_hub_is_only_read(hub, run, monkeypatch):
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
        folder.read("metadata.json", most=9)
    with pytest.raises(InputError, match=f"{URL}@.*: new cannot be written there; expected a loc"):
        folder.write("new", b"", ANY)
