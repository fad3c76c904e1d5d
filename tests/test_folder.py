"""Folder: conditions, versions, ranges, sizes, kinds of files, and what a failing request says.

A bucket of Google's, one of S3's and a local folder behave alike; the buckets are served by
gcs_server.py.
"""

import errno
import logging
import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from cloud import free_port
from obstore.exceptions import GenericError

from activation_extraction.common.errors import InputError
from activation_extraction.store import bucket as bucket_module
from activation_extraction.store import local_files, patience
from activation_extraction.store.bucket import Bucket
from activation_extraction.store.folder import (
    ANY,
    ChangedError,
    Folder,
    FolderError,
    SourceFolder,
    UnsureError,
)
from activation_extraction.store.local_files import check_output_dir, write_bytes
from activation_extraction.store.patience import timeout_for

BUCKETS = ["gs://bucket/run", "s3a://bucket/run"]
MIB = 2**20


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(patience, "MAX_PAUSE", 0.01)


@pytest.fixture
def lines(monkeypatch):
    """The warnings, in their order."""
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger("extract_activations"), "handlers", [Keep("WARNING")])
    return found


@pytest.fixture(params=[*BUCKETS, "folder", "file://"])
def folder(request, bucket, tmp_path):
    """A folder that does not exist yet."""
    urls = {"folder": f"{tmp_path}/a b%c/run", "file://": f"file://{tmp_path}/run"}
    return Folder(urls.get(request.param, request.param), patience=20)


def test_a_write_is_conditional_on_what_stands_there(folder):
    parts = [b"one ", memoryview(b""), np.arange(2, dtype=np.int16)]
    first = folder.write("file", parts, None)
    assert folder.read_with_version("file") == (b"one \0\0\1\0", first)
    with pytest.raises(ChangedError, match="writing file: exists already"):
        folder.write("file", b"two", None)
    second = folder.write("file", b"two", first)
    assert second not in (None, first) and folder.listing()["file"].version == second
    for name, what in (("file", "is another version now"), ("other", "no longer exists")):
        with pytest.raises(ChangedError, match=f"{folder.url}: writing {name}: {what}") as raised:
            folder.write(name, b"three", first)
        assert not raised.value.final
    assert folder.read("file", version=second) == b"two" and folder.files() == {"file": 3}
    with pytest.raises(ChangedError, match="reading file: is another version now"):
        folder.read("file", version=first)
    folder.write("file", b"", ANY)
    folder.write("new", b"4", ANY)
    assert folder.files() == {"file": 0, "new": 1} and folder.retries == 0
    folder.remove("file")
    folder.remove("file")
    assert folder.files() == {"new": 1}


def test_ranges_folders_and_what_is_missing(folder):
    assert folder.listing() == {} and folder.folders() == [] and folder.read("file") is None
    assert folder.read_with_version("file") is None
    child = folder.child("a b%c").child("ü")
    child.write("x#?y", b"0123456789", None)
    cases = {(2, 4): b"23", (7, None): b"789", (None, 3): b"012", (-2, None): b"89", (8, 12): b"89"}
    assert {given: child.read("x#?y", *given) for given in cases} == cases
    assert child.read("x#?y", 3, 3) == child.read("x#?y", 10, 12) == b""
    assert folder.read("file", 1, 2) is None
    folder.write("file", b"", None)
    assert folder.folders() == ["a b%c"] and folder.names() == ["a b%c", "file"]
    assert child.files() == {"x#?y": 10} and folder.child("") is folder
    assert child.url == f"{folder.url}/a b%c/ü"


def test_a_file_that_is_too_large_is_refused_before_it_is_read(folder, bucket):
    folder.write("file", b"x" * 20 * MIB, None)
    before = bucket.served
    for read in (folder.read, folder.read_with_version):
        assert len((read("file", most=20 * MIB) or b"")[:1]) == 1
        with pytest.raises(FolderError, match="file: has 20,971,520 bytes, expected at most 99"):
            read("file", most=99)
    if not folder.local:  # the server notes what it would send
        assert bucket.served - before == 4 * 20 * MIB


@pytest.mark.parametrize("url", BUCKETS)
@pytest.mark.parametrize("ignored", ["If-Match", "If-None-Match"])
def test_each_condition_is_tried_before_it_is_relied_on(bucket, monkeypatch, url, ignored):
    """A store may know one of them only. The file that it is tried with is gone afterwards."""
    folder, original = Folder(url), Bucket.write
    folder.check_conditions()
    assert folder.files() == {}

    def forgetful(self, name, parts, expected):
        forgotten = (expected is None) == (ignored == "If-None-Match")
        return original(self, name, parts, ANY if forgotten else expected)

    monkeypatch.setattr(Bucket, "write", forgetful)
    told = "a second write of .write_test_.*the store ignores If-None-Match or If-Match"
    with pytest.raises(InputError, match=told):
        folder.check_conditions()
    assert folder.files() == {}


@pytest.mark.parametrize("url", BUCKETS)
@pytest.mark.parametrize("fault", ["503", "429", "409", "reset", "lost"])
def test_a_conditional_write_is_sent_once_and_then_unsure(bucket, url, fault, lines):
    folder, beats = Folder(url, 20, lambda: beats.append(1)), []
    bucket.faults, bucket.rate = (fault,), 1.0
    with pytest.raises(UnsureError, match=f"{url}: writing file: ") as raised:
        folder.write("file", b"content", None)
    assert not raised.value.final and folder.retries == 1 and beats
    assert bucket.failed == {fault: 1}
    assert lines[0].endswith("; looking whether it was written") and len(lines) == 1
    bucket.rate = 0
    assert folder.read("file") == (b"content" if fault == "lost" else None)


def test_what_passes_is_retried(bucket):
    folder = Folder("gs://bucket/run", 600)
    bucket.put("run/file", b"x" * 10_000)
    bucket.rate, bucket.faults = 0.5, ("503", "429", "reset", "truncated", "lost")
    for number in range(6):
        assert folder.read("file") == b"x" * 10_000 and folder.files()["file"] == 10_000
        folder.write(f"{number}", b"1", ANY)
        folder.remove(f"{number}")
    assert len(bucket.failed) == 5


def test_every_streak_of_failures_is_one_line(bucket, monkeypatch, lines):
    """Without what obstore repeats by itself."""
    monkeypatch.setattr(bucket_module, "RETRIES", 0)
    folder, faults = Folder("gs://bucket/run", 600, flag="--some_flag"), []
    monkeypatch.setattr(bucket, "choose_fault", lambda: faults.pop() if faults else None)
    for name in ASK.keys() - {"writing file"}:
        faults, before = ["429", "reset", "503"], folder.retries
        ASK[name](folder)
        assert not faults and folder.retries == before + 3
        (line,) = lines
        reason = f"{name} failed (ServiceUnavailable: no); trying again for up to 600 s"
        assert line == f"gs://bucket/run: {reason} (--some_flag)"
        lines.clear()
    faults = ["503"] * 10**6
    with pytest.raises(FolderError, match=r"listing kept failing for . s \(--some_flag\): Service"):
        Folder("gs://bucket/run", 1, flag="--some_flag").files()


ASK = {
    "listing": lambda folder: folder.files(),
    "reading file": lambda folder: folder.read("file"),
    "writing file": lambda folder: folder.write("file", b"1", None),
    "writing new": lambda folder: folder.write("new", b"1", ANY),
    "deleting file": lambda folder: folder.remove("file"),
}
S3_NEEDS = "s3:ListBucket on the bucket; s3:GetObject, s3:PutObject and s3:DeleteObject"


@pytest.mark.parametrize("request_name", ASK)
@pytest.mark.parametrize(
    "url,fault,message",
    [
        (BUCKETS[0], "403", "permission denied (Forbidden: no); needed: roles/storage.objectUser"),
        (BUCKETS[1], "403", f"permission denied (Forbidden: no); needed: {S3_NEEDS}"),
        (BUCKETS[0], "401", "credentials are missing, invalid or have expired (Unauthorized: no); "
         "run `gcloud auth application-default login`"),
        (BUCKETS[1], "401", "expired (Unauthorized: no); set AWS_ACCESS_KEY_ID"),
        (BUCKETS[0], "400", "BadRequest: no"),
        ("gs://elsewhere/run", None, "no such bucket: elsewhere"),
        ("s3://elsewhere/run", None, "no such bucket: elsewhere"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_request_and_what_that_store_needs(
    bucket, url, fault, message, request_name
):
    if fault:
        bucket.faults, bucket.rate = (fault,), 1.0
    folder = Folder(url, patience=20)
    with pytest.raises(FolderError) as raised:
        ASK[request_name](folder)
    assert str(raised.value).startswith(f"{url}: {request_name}: ")
    assert message in str(raised.value) and raised.value.final and folder.retries == 0


def test_nobody_listens_and_nobody_answers(bucket, monkeypatch):
    """What is silent is given up after the patience, also in the middle of an answer."""
    variables = {"gs://b/run": "STORAGE_EMULATOR_HOST", "s3://b/run": "AWS_ENDPOINT_URL"}
    for url, variable in variables.items():
        nobody = f"http://127.0.0.1:{free_port()}"
        monkeypatch.setenv(variable, nobody)
        with pytest.raises(FolderError, match="kept failing for .*: Connection refused"):
            Folder(url, patience=0.3).files()
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            monkeypatch.setenv(variable, f"http://127.0.0.1:{silent.getsockname()[1]}")
            folder = Folder(url, patience=0.2)
            for name in ("listing", "reading file", "deleting file", "writing new"):
                with pytest.raises(FolderError, match=f"{name} kept failing for .* s: no answer"):
                    ASK[name](folder)
            with pytest.raises(UnsureError, match="writing file: no answer"):
                ASK["writing file"](folder)


def test_an_answer_that_stops_in_the_middle_is_asked_for_again(bucket, monkeypatch):
    bucket.put("run/file", b"x" * MIB)
    faults = ["half"]
    monkeypatch.setattr(bucket_module, "SILENCE", 0.2)
    monkeypatch.setattr(bucket, "choose_fault", lambda: faults.pop() if faults else None)
    assert Folder("gs://bucket/run", patience=60).read("file") == b"x" * MIB and not faults


@pytest.mark.parametrize(
    "scheme,variables,reason,advice",
    [
        ("gs", {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere"}, "No such file", "run `gcloud auth"),
        ("s3", {"AWS_ACCESS_KEY_ID": "x"}, "Missing SecretAccessKey", "set AWS_ACCESS_KEY_ID and"),
        ("az", {}, "Account must be specified", "set AZURE_STORAGE_ACCOUNT_NAME and"),
    ],
)
def test_settings_that_cannot_be_used_are_told_with_a_remedy(
    monkeypatch, scheme, variables, reason, advice
):
    for name in ("STORAGE_EMULATOR_HOST", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    folder = Folder(f"{scheme}://elsewhere/run", patience=20)
    with pytest.raises(FolderError, match=f"listing: .*{reason}.*; {advice}") as raised:
        folder.files()
    assert raised.value.final and folder.retries == 0


TOKEN = "Generic GCS error: Error performing token request: Error performing GET http://169.254.169.254/x"


@pytest.mark.parametrize("worked", [False, True])
def test_a_machine_that_gives_no_credentials_is_asked_again_only_if_it_did_before(bucket, worked):
    """A metadata server may be out of reach for a moment."""
    folder = Bucket("gs://bucket/run", 20)
    if worked:
        folder.entries()
    error = folder._explained(GenericError(f"{TOKEN} - status code: 503 No: x\n\nDebug source:\n"))
    assert error.reason.startswith("no credentials were found, nor given by the machine (503 No)")
    assert "; run `gcloud auth" in error.reason and error.final != worked


def test_azure_takes_the_account_from_the_url(monkeypatch):
    found = []
    monkeypatch.setattr(bucket_module, "AzureStore", lambda *a, **k: found.append((a, k)))
    for url in ("abfs://box@account.dfs.core.windows.net/run", "az://box/run"):
        Bucket(url, 20)._store(0)
    assert [(names, options.get("account_name")) for names, options in found] == [
        (("box",), "account"),
        (("box",), None),
    ]


def test_keys_do_not_get_into_messages(bucket, monkeypatch):
    bucket.faults, bucket.rate = ("403", "503"), 1.0
    for _ in range(4):
        with pytest.raises(FolderError) as raised:
            Folder("s3://bucket/run", patience=0).read("file")
        assert "Signature" not in str(raised.value) and "127.0.0.1" not in str(raised.value)


def test_the_time_for_a_request_follows_its_size(bucket, monkeypatch):
    """At 16 Mbit/s, shared by 16 uploads; small objects have the patience alone."""
    assert timeout_for(1, 300) == timeout_for(30_000_000, 300) == 300
    assert timeout_for(1_000_000_000, 300) >= 16 * 1e9 / 2e6
    monkeypatch.setattr(patience, "MIN_BYTES_PER_SECOND", 10.0)
    limits, original = [], bucket_module._connect

    def connect(kind, name, endpoint, seconds, *more):
        limits.append(seconds)
        return original(kind, name, endpoint, seconds, *more)

    monkeypatch.setattr(bucket_module, "_connect", connect)
    folder = Folder("gs://bucket/run", patience=20)
    folder.write("file", b"x" * 1000, None)
    folder.read("file", 0, 1000)
    folder.read("file", 0, 10)
    assert limits == [102.4, 102.4, 20]


def test_an_object_larger_than_one_request_takes_is_not_sent(bucket, monkeypatch):
    small = bucket_module.GOOGLE._replace(largest=10)
    monkeypatch.setitem(bucket_module.KINDS, "gs", small)
    folder = Folder("gs://bucket/run")
    with pytest.raises(FolderError, match="writing file: has .* GB, more than the .* GB") as raised:
        folder.write("file", b"x" * 11, None)
    assert raised.value.final and folder.largest == 10 and not bucket.asked


def test_one_file_is_one_request_and_versions_cost_a_look_on_google_only(bucket):
    for url, look in (("gs://bucket/run", ["HEAD"]), ("s3://bucket/s3", [])):
        folder = Folder(url)
        first = folder.write("file", [b"x" * MIB] * 20, None)
        folder.write("file", b"2", first)
        folder.read_with_version("file")
        asked = [method for method, _ in bucket.asked]
        assert asked == ["PUT", *look, "PUT", "GET"]
        bucket.asked.clear()


def test_a_listing_has_all_pages_and_no_marker(bucket):
    bucket.put("run/", b"")  # as consoles make for an empty folder
    for number in range(2500):
        bucket.put(f"run/{number}", b"1")
    bucket.put("run2/other", b"1")
    for url in BUCKETS:
        assert Folder(url).files() == {f"{number}": 1 for number in range(2500)}


def test_python_goes_on_and_the_folder_beats_while_a_slow_server_takes_an_object(
    bucket, monkeypatch
):
    """If the request held Python's lock, the server, of this process, could not answer."""
    monkeypatch.setattr(patience, "HEARTBEAT", 0.001)
    beaten, arrived, go = threading.Event(), threading.Event(), threading.Event()

    def hold(method, _):
        if method == "PUT":
            arrived.set()
            go.wait(600)

    bucket.before = hold
    folder = Folder("gs://bucket/run", 600, beaten.set)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(folder.write, "file", b"x" * MIB, None)
        assert arrived.wait(600) and beaten.wait(600) and not done.done()
        go.set()
        assert done.result()
    assert folder.retries == 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_s_reason_is_told_at_once(tmp_path, monkeypatch, error):
    reasons = {
        errno.ENOSPC: "the disk is full; make room first",
        errno.EROFS: "the file system is read-only; make it writable first",
        errno.EACCES: "permission denied",
        errno.EIO: "Input/output error",
    }

    def fail(*_):
        raise OSError(error, os.strerror(error))

    folder = Folder(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FolderError) as raised:
        folder.write("file", b"1", None)
    assert str(raised.value) == f"{tmp_path}: writing file: {reasons[error]}"
    assert raised.value.final and folder.retries == 0 and not list(tmp_path.iterdir())


def make(kind, path):
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)  # a socket's path is short
            server.bind(path.name)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a socket", "a device"])
def test_only_regular_files_are_opened(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    make(kind, tmp_path / "odd")
    folder = Folder(str(tmp_path))
    for read in (folder.read, folder.read_with_version):
        with pytest.raises(FolderError, match=f"reading odd: is {kind}, expected a regular file"):
            read("odd")
    for expected in (None, ANY, "1-2-3"):
        with pytest.raises(FolderError, match="writing odd: is a") as raised:
            folder.write("odd", b"1", expected)
        assert raised.value.final
    assert folder.files() == {} and (tmp_path / "odd").exists()


def test_links_are_read_but_not_written_through(tmp_path):
    """Somebody else may have put one into the folder."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("file", ".new.tmp", ".report.tmp"):
        (tmp_path / name).symlink_to(precious)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # as a file that is renamed meanwhile
    folder = Folder(str(tmp_path))
    assert folder.read("file") == b"mine" and folder.read("gone") is None
    assert folder.files() == dict.fromkeys(("precious", "file", ".new.tmp", ".report.tmp"), 4)
    for expected in (None, ANY, (folder.read_with_version("file") or (b"", ""))[1]):
        with pytest.raises(FolderError, match="writing file: is a symbolic link"):
            folder.write("file", b"other", expected)
    folder.write("new", b"1", None)
    write_bytes(tmp_path / "report", b"2")
    assert precious.read_text() == "mine" and (tmp_path / "file").is_symlink()
    (tmp_path / "metrics.jsonl").symlink_to(precious)
    with pytest.raises(InputError, match="metrics.jsonl is a symbolic link"):
        check_output_dir(tmp_path)


def test_a_local_file_is_complete_and_synced_before_it_has_its_name(tmp_path, monkeypatch):
    synced, steps = [], []
    fsync, link, replace = os.fsync, os.link, os.replace

    def sync(descriptor):
        fsync(descriptor)
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("folder" if is_folder else f"file of {os.fstat(descriptor).st_size}")
        synced.append(os.fstat(descriptor).st_ino)

    def note(name, action):
        return lambda *paths: steps.append(name) or action(*paths)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "link", note("link", link))
    monkeypatch.setattr(os, "replace", note("rename", replace))
    folder = Folder(f"{tmp_path}/new")
    first = folder.write("file", b"content", None)
    assert (
        steps == ["file of 7", "link", "folder"]
        and os.stat(f"{tmp_path}/new/file").st_ino in synced
    )
    steps.clear()
    folder.write("file", b"other", first)
    assert steps == ["file of 5", "rename", "folder"] and os.listdir(f"{tmp_path}/new") == ["file"]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_create_a_local_file_one_succeeds(tmp_path, monkeypatch, links):
    """Also where the file system has no hard links, and the name appears at the last moment."""

    def refuse(*_):
        raise OSError(errno.EPERM, "")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    finish = local_files.AtomicFile.finish

    def overtaken(self):
        finish(self)
        (tmp_path / "file").write_bytes(b"of another")

    folder = Folder(str(tmp_path))
    folder.write("new", b"1", None)
    monkeypatch.setattr(local_files.AtomicFile, "finish", overtaken)
    monkeypatch.setattr("activation_extraction.store.local_files.LocalFolder._check_expected",
                        lambda *_: None)  # fmt: skip
    with pytest.raises(ChangedError, match="writing file: exists already"):
        folder.write("file", b"mine", None)
    assert folder.read("file") == b"of another" and folder.files() == {"file": 10, "new": 1}


def test_any_other_url_is_only_read(tmp_path):
    url = f"memory://{tmp_path}/run"
    fsspec.filesystem("memory").pipe({f"{tmp_path}/run/a": b"123", f"{tmp_path}/run/b/c": b"1"})
    folder = Folder(url)
    assert folder.files() == {"a": 3} and folder.folders() == ["b"] and not folder.local
    assert folder.read("a", 1, 3) == b"23" and folder.read("a", -1) == b"3"
    assert folder.read("x") is None and folder.child("x").files() == {}
    with pytest.raises(FolderError, match="reading a: has 3 bytes, expected at most 2"):
        folder.read("a", most=2)
    for ask in (lambda: folder.write("d", b"1", ANY), lambda: folder.remove("a"),
                folder.check_conditions):  # fmt: skip
        with pytest.raises(
            InputError, match=f"{url}: .* cannot be written there; expected a local"
        ):
            ask()
    with pytest.raises(FolderError, match="nonsense://x: .*nonsense"):
        Folder("nonsense://x")


def test_what_others_wrote_in_a_bucket_is_read_by_fsspec_and_retried(bucket, lines):
    bucket.put("models/x", b"123")
    folder = SourceFolder("gs://bucket/models", patience=600)
    assert folder.files() == {"x": 3} and folder.digest("x") == (
        "md5",
        "202cb962ac59075b964b07152d234b70",
    )
    faults = iter(["503"] * 8)
    bucket.choose_fault = lambda: next(faults, None)
    assert folder.read("x", 1, 2) == b"2" and folder.retries == 1
    assert lines[0].startswith("gs://bucket/models: reading x failed (no")
