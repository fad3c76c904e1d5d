"""Text that leaves the program: no control character reaches a terminal, no secret anybody."""

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import forks
import fsspec
import pytest
from command_line import SCRIPT, assert_refused, main
from extractions import edit, extract

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.common.log import log, start_logging
from activation_extraction.common.visible import say, visible, without_secrets
from activation_extraction.store.folder import Folder
from activation_extraction.store.patience import FolderError
from activation_extraction.text.rows import Columns
from activation_extraction.text.sources import list_files, open_files

# Clears the screen, sets the title, C1's CSI, a change of direction, a hidden space, a line of
# somebody else's, a lone surrogate (a file name that is not UTF-8).
HOSTILE = "ä漢\x1b[2J\x1b]0;x\x07\x9b1m\u202e\u200b\nforged\r\x7f\udcff"
SHOWN = r"ä漢\x1b[2J\x1b]0;x\x07\x9b1m\u202e\u200b\nforged\r\x7f\udcff"


SAY_MUCH = """
from activation_extraction.common.visible import make_streams_safe
make_streams_safe()
print("x" * 2**20)
"""


def test_control_characters_are_shown_and_letters_stay(capsys):
    assert visible(HOSTILE) == SHOWN
    say("one", HOSTILE)
    assert capsys.readouterr().out == f"one\n{SHOWN}\n"


def test_the_log_is_filtered_with_its_tracebacks(capsys):
    start_logging(False, 0, 0)
    log.warning("%s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.error("failed", exc_info=True)
    printed = capsys.readouterr().err
    assert printed.splitlines()[0].endswith(f"WARNING machine 0 host 0: {SHOWN}")
    assert "\x1b" not in printed and "\x9b" not in printed and "\u202e" not in printed
    assert r"ValueError: ä漢\x1b[2J" in printed and printed.count("Traceback") == 1
    record = logging.makeLogRecord({"msg": HOSTILE})  # of a library
    for handler in (logging.lastResort, *logging.getLogger("huggingface_hub").handlers):
        assert handler.format(record) == SHOWN


@pytest.mark.parametrize("flag", ["model_path", "dataset_path", "text_column", "bogus"])
def test_errors_show_what_was_typed(flag, inputs, tmp_path, capsys):
    assert_refused(capsys, tmp_path, [*inputs, f"--{flag}", "a/b\x1b[2J\x07"], r"a/b\x1b[2J\x07")


def test_what_others_have_stored_is_shown(tmp_path, capsys):
    extract(tmp_path)
    hostile = HOSTILE[:-1]  # JSON holds no lone surrogate
    edit(tmp_path / "metadata.json", lambda content: content.update(status=hostile))
    assert main("--status", "--output_dir", tmp_path) == 0
    assert visible(hostile) in (out := capsys.readouterr().out) and "\x1b" not in out
    (tmp_path / "metadata.json").unlink()
    hostile = tmp_path.rename(tmp_path.with_name("\x1b[2J"))
    assert main("--status", "--output_dir", hostile) == 1
    assert r"\x1b[2J/metadata.json: is missing" in (out := capsys.readouterr().out)
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "url,plain",
    [
        ("https://me:pass@host:8080/a/b.jsonl", "https://host:8080/a/b.jsonl"),
        ("https://hf_token@host/a", "https://host/a"),
        ("https://host/a.jsonl?X-Amz-Signature=1f&X-Amz-Date=2", "https://host/a.jsonl"),
        ("https://host/a?X-Goog-Signature=1f", "https://host/a"),
        ("abfs://box@account.dfs.core.windows.net/a?sv=1&sig=2", None),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("zip://a.jsonl::https://me:pass@host/a.zip?token=3", "zip://a.jsonl::https://host/a.zip"),
        ("s3://bucket/part_?.jsonl", "s3://bucket/part_?.jsonl"),  # a wildcard
        ("hf://gpt2@main/config.json", "hf://gpt2@main/config.json"),  # a revision
        ("/data/a@b/c", "/data/a@b/c"),
    ],
)
def test_urls_lose_their_secrets(url, plain):
    plain = plain or "abfs://box@account.dfs.core.windows.net/a"
    assert without_secrets(url) == plain == without_secrets(plain)
    assert visible(f"GET '{url}': 403") == f"GET '{plain}': 403"


def test_a_path_of_a_library_loses_its_signature():
    said = "Max retries exceeded with url: /a.jsonl?X-Amz-Signature=1f&partNumber=2 (Caused by X)"
    assert visible(said) == said.replace("=1f", "=...")


def test_the_recorded_configuration_has_no_secrets():
    config = parse_args(
        ["--model_path", "https://me:pass@host/model", "--output_dir", "out?token=1"]
        + ["--dataset_path", "https://host/a.jsonl?sig=secret", "--upload_to_gcs"]
        + ["--gcs_bucket", "gs://key:pass@bucket"]
    )
    recorded = config.to_json()
    assert recorded["model_path"] == "https://host/model"
    assert recorded["dataset_path"] == "https://host/a.jsonl"
    assert recorded["bucket_url"] == "gs://bucket/activations"
    assert recorded["output_dir"] == "out?token=1"  # not a URL
    assert config.bucket_url == "gs://key:pass@bucket/activations"  # opens the bucket


def test_a_bucket_is_named_without_secrets(tmp_path):
    """It is opened with them: fsspec's memory file system takes the whole URL as the path."""
    url, plain = (f"memory://{user}{tmp_path.name}/run" for user in ("key:pass@", ""))
    extract(tmp_path / "out")
    fsspec.filesystem("memory").put(f"{tmp_path}/out/", url, recursive=True)
    assert Folder(url).url == plain
    dataset = ActivationDataset(url)
    assert len(dataset) == 10 and len(list(dataset)) == 10 and "pass" not in repr(dataset)
    with pytest.raises(ValueError, match="holds no extraction") as refused:
        ActivationDataset(f"{url}/nothing")
    assert "pass" not in str(refused.value)
    with pytest.raises(FolderError) as failed:
        Folder("nope://me:pass@host/a")
    assert "pass" not in str(failed.value)


@pytest.fixture
def signed_files(tmp_path):
    """A server of files, which takes any signature, and the rows of its file a.jsonl.gz."""
    rows = [{"text": f"row {number}"} for number in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", rows
        server.shutdown()


def test_another_signature_is_the_same_data(signed_files):
    """Files at signed URLs are read, and described without what signs them."""
    url, rows = signed_files
    first = f"{url}/a.jsonl.gz?X-Amz-Signature=one"
    assert [row.read() for row in open_files(first, Columns(("text",)))] == rows
    described = [(file.name, file.size) for file in list_files(first)]
    again = list_files(f"{url}/a.jsonl.gz?X-Amz-Credential=AK/2026/s3")
    assert described == [(file.name, file.size) for file in again]
    assert described[0][0] == "a.jsonl.gz"


def no_reader():
    """A pipe that nobody reads from, as that of a `head` that has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


STREAMS = {
    "no reader": no_reader,
    "full disk": lambda: os.open("/dev/full", os.O_WRONLY),
    "ascii": lambda: os.open(os.devnull, os.O_WRONLY),
}


def status_with(stream, *flags):
    """The exit status of a command with such a stdout and stderr."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment |= {"PYTHONPATH": str(SCRIPT.parent)}
    if stream == "ascii":
        environment["PYTHONIOENCODING"] = "ascii"
    if stream == "closed":
        command = ["sh", "-c", '"$@" >&- 2>&-', "-", sys.executable, SCRIPT, *flags]
        return subprocess.run([*map(str, command)], env=environment, timeout=600).returncode
    log = STREAMS[stream]()
    try:
        return forks.start([str(SCRIPT), *map(str, flags)], environment, log).wait(600)
    finally:
        os.close(log)


@pytest.mark.long
@pytest.mark.parametrize("stream", [*STREAMS, "closed"])
def test_no_stream_changes_an_exit_status(stream, inputs, tmp_path):
    """A run names its folder, which is not ASCII, and so do those that look at it."""
    out = ["--output_dir", tmp_path / "größe"]
    assert status_with(stream, *inputs, "--max_samples", 3, *out) == 0
    assert json.loads((out[1] / "metadata.json").read_text())["status"] == "complete"
    assert status_with(stream, *inputs, "--max_samples", "none", *out) == 2
    if stream != "closed":  # each would be a process of its own
        for flags in (["--status", "--json", *out], ["--verify", *out], ["--help"]):
            assert status_with(stream, *flags) == 0
        for flags in (["--list_hooks", *inputs], ["--plan", "h100", *inputs]):
            assert status_with(stream, *flags) == 0
        (out[1] / "shard_0001.pkl.gz").unlink()
        assert status_with(stream, "--verify", *out) == 1


def test_a_stream_that_does_not_block_is_waited_for():
    """As where another program has made it so, and reads slowly."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    command = [sys.executable, "-c", SAY_MUCH]
    with subprocess.Popen(command, stdout=writes, stderr=subprocess.PIPE) as process:
        os.close(writes)
        time.sleep(1)
        with open(reads, "rb") as file:
            assert len(file.read()) == 2**20 + 1
        assert process.wait(60) == 0 and process.stderr.read() == b""


def test_a_full_disk_under_stdout_is_named(tmp_path):
    """Exit statuses speak of the run, so that only a line on stderr says what is lost."""
    command = [sys.executable, "-m", "activation_extraction.cli.config", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=SCRIPT.parent, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        0,
        b"stdout cannot be written: No space left on device\n",
    )
