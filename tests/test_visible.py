"""Text that leaves the program: no control character reaches a terminal, no secret anybody."""

import logging
import os
import subprocess
import sys

import fsspec
import pytest
from command_line import SCRIPT, assert_refused, main
from extractions import edit, extract

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.common.log import log, start_logging
from activation_extraction.common.visible import say, visible, without_secrets
from activation_extraction.store.folder import Folder

# Clears the screen, sets the title, C1's CSI, a change of direction, a hidden space, a line of
# somebody else's, a lone surrogate (a file name that is not UTF-8).
HOSTILE = "ä漢\x1b[2J\x1b]0;x\x07\x9b1m\u202e\u200b\nforged\r\x7f\udcff"
SHOWN = r"ä漢\x1b[2J\x1b]0;x\x07\x9b1m\u202e\u200b\nforged\r\x7f\udcff"


def test_what_is_said_and_the_log_show_control_characters(capsys):
    """Tracebacks and what libraries log show them, too; letters stay."""
    say("one", HOSTILE)
    assert capsys.readouterr().out == f"one\n{SHOWN}\n"
    start_logging(False, 0, 0)
    log.warning("%s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.error("failed", exc_info=True)
    printed = capsys.readouterr().err
    assert printed.splitlines()[0].endswith(f"WARNING machine 0 host 0: {SHOWN}")
    assert not any(character in printed for character in "\x1b\x9b\u202e")
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


@pytest.mark.parametrize(
    "url,plain",
    [
        ("https://me:pass@host:8080/a/b.jsonl", "https://host:8080/a/b.jsonl"),
        ("https://hf_token@host/a", "https://host/a"),
        ("hf://gpt2@main/config.json", "hf://gpt2@main/config.json"),  # a revision
        ("https://host/a.jsonl?X-Amz-Signature=1f&X-Amz-Date=2", "https://host/a.jsonl"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("zip://a.jsonl::https://me:pass@host/a.zip?token=3", "zip://a.jsonl::https://host/a.zip"),
        ("s3://bucket/part_?.jsonl", "s3://bucket/part_?.jsonl"),  # a wildcard
        ("/data/a@b/c", "/data/a@b/c"),
    ],
)
def test_urls_lose_their_secrets(url, plain):
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
    # The configuration keeps the secret, because the bucket is opened with it.
    assert config.output_options.bucket_url == "gs://key:pass@bucket/activations"


def test_a_bucket_is_named_without_secrets(tmp_path):
    """It is opened with them: fsspec's memory file system takes the whole URL as the path."""
    url, plain = (f"memory://{user}{tmp_path.name}/run" for user in ("key:pass@", ""))
    extract(tmp_path / "out")
    fsspec.filesystem("memory").put(f"{tmp_path}/out/", url, recursive=True)
    assert Folder(url).url == plain
    dataset = ActivationDataset(url)
    assert len(list(dataset)) == 10 and "pass" not in repr(dataset)
    with pytest.raises(ValueError, match="holds no run") as refused:
        ActivationDataset(f"{url}/nothing")
    assert "pass" not in str(refused.value)


LOST = b"stdout cannot be written: No space left on device\n"
STREAMS = {  # what happens to them, and what is said on stderr
    "no reader": ('"$@" | true; exit ${PIPESTATUS[0]}', b""),  # as that of a `head` that has ended
    "full disk": ('"$@" >/dev/full', LOST),
}


@pytest.mark.long
@pytest.mark.parametrize("stream", STREAMS)
def test_no_stream_changes_an_exit_status(stream, tmp_path):
    """The last line names the folder, which is not ASCII, as the streams are."""
    out, (shell, said) = tmp_path / "größe", STREAMS[stream]
    extract(out)
    look = [SCRIPT, "--status", "--aggregate", "--output_dir", out]
    command = ["bash", "-c", shell, "-", sys.executable, *look]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, said)
