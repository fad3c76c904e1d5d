"""Text that leaves the program: no control character reaches a terminal, no secret anybody."""

import logging
import os
import select
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest
from command_line import SCRIPT, assert_refused, main
from extractions import edit, extract
from row_files import write_rows

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.common.log import log, start_logging
from activation_extraction.common.visible import say, visible, without_secrets
from activation_extraction.store.folder import Folder, FolderError
from activation_extraction.text.rows import Columns
from activation_extraction.text.sources import list_files, open_files

# Clears the screen, sets the title, C1's CSI, a change of direction, a hidden space, a line of
# somebody else's, a lone surrogate (a file name that is not UTF-8).
HOSTILE = "ä漢\x1b[2J\x1b]0;x\x07\x9b1m\u202e\u200b\nforged\r\x7f\udcff"
SHOWN = r"ä漢\x1b[2J\x1b]0;x\x07\x9b1m\u202e\u200b\nforged\r\x7f\udcff"


def test_control_characters_are_shown_and_letters_stay(capsys):
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


def test_what_was_typed_or_stored_by_others_is_shown(inputs, tmp_path, capsys):
    for flag in ("--model_path", "--dataset_path", "--bogus"):
        assert_refused(capsys, tmp_path, [*inputs, flag, "a/b\x1b[2J\x07"], r"a/b\x1b[2J\x07")
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
    said = "exceeded with url: /a.jsonl?X-Amz-Signature=1f&partNumber=2 (Caused by X)"
    assert visible(said) == said.replace("=1f", "=...")


def test_the_recorded_configuration_has_no_secrets():
    flags = "--model_path https://me:pass@host/model --output_dir out?token=1 --upload_to_gcs "
    flags += "--gcs_bucket gs://key:pass@bucket --mix https://host/a.jsonl?sig=secret=2"
    config = parse_args(flags.split())
    recorded = config.to_json()
    assert recorded["model_path"] == "https://host/model"
    assert recorded["mix"] == [("https://host/a.jsonl", 2)]
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


def test_another_signature_is_the_same_data(tmp_path):
    """Files at signed URLs are read, and described without what signs them."""
    rows = [{"text": f"row {number}"} for number in range(3)]
    write_rows(tmp_path / "a.jsonl.gz", rows)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.jsonl.gz"
        first = f"{url}?X-Amz-Signature=one"
        assert [row.read() for row in open_files(first, Columns(("text",)))] == rows
        for signed in (first, f"{url}?X-Amz-Credential=AK/2026/s3"):
            (described,) = list_files(signed)
            assert described.name == "a.jsonl.gz" and described.size > 0
        server.shutdown()


STREAMS = {
    "no reader": '"$@" 2>&1 | true; exit ${PIPESTATUS[0]}',  # as that of a `head` that has ended
    "full disk": '"$@" >/dev/full 2>&1',
    "ascii": 'PYTHONIOENCODING=ascii "$@" >/dev/null 2>&1',
    "closed": '"$@" >&- 2>&-',
}


@pytest.mark.long
@pytest.mark.parametrize("stream", STREAMS)
def test_no_stream_changes_an_exit_status(stream, tmp_path):
    """All messages name the folder, which is not ASCII."""
    out = tmp_path / "größe"
    extract(out)
    for flag, status in (("--verify", 0), ("--max_samples", 2), ("--verify", 1)):
        command = ["bash", "-c", STREAMS[stream], "-", sys.executable, SCRIPT, flag]
        assert subprocess.run([*command, "--output_dir", out]).returncode == status
        (out / "shard_0001.json").unlink(missing_ok=True)


SAY_MUCH = """
from activation_extraction.common.visible import make_streams_safe
make_streams_safe()
print("x" * 2**20)
"""


def test_a_stream_that_does_not_block_is_waited_for():
    """Another program may have made it so, and may read only once the pipe is full."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    command = [sys.executable, "-c", SAY_MUCH]
    with subprocess.Popen(command, stdout=writes, stderr=subprocess.PIPE) as process:
        while select.select([], [writes], [], 0)[1]:
            assert process.poll() is None
        os.close(writes)
        with open(reads, "rb") as file:
            assert len(file.read()) == 2**20 + 1
        assert process.wait(60) == 0 and process.stderr.read() == b""


def test_a_full_disk_under_stdout_is_named():
    """Exit statuses speak of the run, so that only a line on stderr says what is lost."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", SAY_MUCH]
        done = subprocess.run(command, cwd=SCRIPT.parent, stdout=full, stderr=subprocess.PIPE)
    told = b"stdout cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (0, told)
