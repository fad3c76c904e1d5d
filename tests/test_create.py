"""Folder.create: shards that go from memory to a store in one conditional request."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import pytest

from activation_extraction.store import patience
from activation_extraction.store.folder import Folder, ObjectExistsError
from activation_extraction.store.object_store import ObjectStore, RequestError, as_os_error
from activation_extraction.store.patience import FolderError, timeout_for
from activation_extraction.store.shard_writer import SHARDS_AT_ONCE

NAME = "run/shard_0001.npz"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(patience, "MAX_PAUSE", 0.01)


def create(folder, data=b"content", name="shard_0001.npz"):
    parts = [memoryview(data)] if isinstance(data, bytes) else data
    whole = b"".join(parts)
    folder.create(name, parts, len(whole), google_crc32c.value(whole))


def puts(bucket):
    return [name for method, name in bucket.asked if method == "PUT"]


def test_one_put_and_one_look_create_an_object(bucket):
    folder = Folder("gs://bucket/run", patience=20)
    create(folder)
    assert bucket.asked == [("PUT", NAME), ("GET", NAME)]
    create(folder, [memoryview(b"two "), memoryview(b""), memoryview(b"parts")], "a b%c/ü")
    assert bucket.objects() == {NAME: b"content", "run/a b%c/ü": b"two parts"}
    assert folder.retries == 0


def test_what_is_there_already_is_left_alone(bucket):
    folder = Folder("gs://bucket/run", patience=20)
    create(folder)
    create(folder)  # as after a lost answer
    for other in (b"CONTENT", b"longer content"):
        with pytest.raises(ObjectExistsError, match="shard_0001.npz: exists already"):
            create(folder, other)
    assert bucket.objects() == {NAME: b"content"} and folder.retries == 0


def test_an_object_whose_answer_was_lost_is_not_sent_again(bucket, monkeypatch):
    folder = Folder("gs://bucket/run", patience=20)
    faults = ["lost"]
    monkeypatch.setattr(bucket, "choose_fault", lambda: faults.pop() if faults else None)
    create(folder)
    assert puts(bucket) == [NAME] and folder.retries == 1
    assert bucket.objects() == {NAME: b"content"}


def damage(monkeypatch, after=lambda: None):
    """The first object arrives with other content than was sent."""
    original, damaged = ObjectStore.create, []

    def create(self, key, parts, size):
        if damaged:
            return original(self, key, parts, size)
        damaged.append(key)
        version = original(self, key, [memoryview(b"CONTENT")], size)
        after()
        return version

    monkeypatch.setattr(ObjectStore, "create", create)


def test_what_arrives_damaged_is_deleted_and_sent_again(bucket, monkeypatch):
    damage(monkeypatch)
    folder = Folder("gs://bucket/run", patience=20)
    create(folder)
    assert bucket.objects() == {NAME: b"content"} and folder.retries == 1
    assert ("DELETE", NAME) in bucket.asked


def test_what_somebody_else_has_put_in_its_place_is_not_deleted(bucket, monkeypatch):
    damage(monkeypatch, after=lambda: bucket.put(NAME, b"of another"))
    with pytest.raises(ObjectExistsError):
        create(Folder("gs://bucket/run", patience=20))
    assert bucket.objects() == {NAME: b"of another"}


@pytest.mark.parametrize(
    "fault,final,message",
    [
        ("403", True, "permission denied (Forbidden: no); needed: roles/storage.objectUser"),
        ("401", True, "the credentials are missing, invalid or have expired (Unauthorized: no)"),
        ("400", True, "BadRequest: no"),
        ("503", False, " s: ServiceUnavailable: no"),
    ],
)
def test_a_refusal_is_told_in_few_words(bucket, monkeypatch, fault, final, message):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 60)  # longer than the patience: one attempt
    bucket.faults, bucket.rate = (fault,), 1.0
    with pytest.raises(FolderError) as raised:
        create(Folder("gs://bucket/run", patience=20))
    assert message in str(raised.value) and raised.value.final == final


def test_a_missing_bucket_is_told(bucket):
    with pytest.raises(FolderError, match="no such bucket: elsewhere") as raised:
        create(Folder("gs://elsewhere/run", patience=20))
    assert raised.value.final


def test_nobody_listens_and_nobody_answers(bucket, monkeypatch):
    """A silent server is given up within the patience, also after it has taken everything."""
    monkeypatch.setattr(patience, "FIRST_PAUSE", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(FolderError, match="kept failing for .* s: Connection refused"):
            create(Folder("gs://bucket/run", patience=0.1))
        silent.listen()
        folder = Folder("gs://bucket/run", patience=0.3)
        with pytest.raises(FolderError, match="kept failing for .* s: no answer"):
            create(folder)
    assert folder.retries == 0


def test_python_goes_on_while_a_slow_server_takes_an_object(bucket):
    """This thread lets the server answer, and the bucket's thread, of this process, waits for it.

    If the request held Python's lock, both would wait until it times out.
    """
    arrived, go = threading.Event(), threading.Event()

    def hold(method, _):
        if method == "PUT":
            arrived.set()
            go.wait(600)

    bucket.before = hold
    folder = Folder("gs://bucket/run", patience=10)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(create, folder, b"x" * 2**20)
        assert arrived.wait(600) and not done.done()
        go.set()
        done.result()
    assert folder.retries == 0 and puts(bucket) == [NAME]


def test_a_long_request_beats(bucket, monkeypatch):
    """So that nobody ends a run because a slow upload makes no other sign of life."""
    monkeypatch.setattr(patience, "HEARTBEAT", 0.001)
    beaten = threading.Event()
    bucket.before = lambda method, _: method == "PUT" and beaten.wait(600)
    create(Folder("gs://bucket/run", 10, beaten.set))
    assert beaten.is_set()


def test_the_time_for_a_request_follows_the_size_of_its_object():
    """At 16 Mbit/s, shared by all that are uploaded; small objects have the patience alone."""
    assert timeout_for(1, 300) == timeout_for(30_000_000, 300) == 300
    assert timeout_for(1_000_000_000, 300) >= SHARDS_AT_ONCE * 1e9 / 2e6


def test_a_slow_upload_is_not_cut_and_when_it_fails_is_sent_again(bucket, monkeypatch):
    """It takes longer than the patience, which is for silence only."""
    monkeypatch.setattr(patience, "MIN_BYTES_PER_SECOND", 0.1)  # 80 s for 7 bytes
    faults = ["503"]

    def choose():
        if not faults:
            return None
        time.sleep(2.5)
        return faults.pop()

    monkeypatch.setattr(bucket, "choose_fault", choose)
    folder = Folder("gs://bucket/run", patience=2)
    create(folder)
    assert bucket.objects() == {NAME: b"content"} and folder.retries == 1


def test_an_error_shows_no_more_than_the_code_and_the_message():
    text = (
        "Generic S3 error: Error performing PUT http://x/b/k in 2ms - Server returned non-2xx "
        "status code: {}: <Error><Code>{}</Code><Message>why</Message><StringToSign>AWS4 secret"
        "</StringToSign></Error>\n\nDebug source:\nGeneric {{ secret TimedOut }}"
    )
    refused = as_os_error(Exception(text.format("403 Forbidden", "SignatureDoesNotMatch")))
    assert isinstance(refused, RequestError) and refused.code == 403
    assert str(refused) == "SignatureDoesNotMatch: why"
    assert as_os_error(Exception(text.format("400 Bad Request", "BadDigest"))).code == 0


@pytest.mark.parametrize("url", ["memory://{}/folder", "{}/folder"])
def test_other_stores_get_files_as_ever(tmp_path, url):
    folder = Folder(url.format(tmp_path), patience=5)
    create(folder)
    create(folder, [memoryview(b"two "), memoryview(b"parts")])
    assert folder.read("shard_0001.npz") == b"two parts"
    assert folder.files() == {"shard_0001.npz": 9}
