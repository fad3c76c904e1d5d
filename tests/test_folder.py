"""Folder: conditions, versions, ranges, sizes, kinds of files, and what a failing request says.

Buckets of Google's, S3's and Azure's, a bucket behind an S3 gateway and a local folder behave
alike; gcs_server.py and gateway.py serve the buckets.
"""

import copy
import errno
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from cloud import free_port
from command_line import main
from gateway import gateway
from obstore.exceptions import GenericError
from pods import flags_for

from activation_extraction.common.errors import InputError
from activation_extraction.store import bucket as bucket_module
from activation_extraction.store import folder as folder_module
from activation_extraction.store import sending
from activation_extraction.store.answers import FailureKind, failure_of_obstore
from activation_extraction.store.bucket import Bucket
from activation_extraction.store.bucket_kinds import AZURE as AZURE_KIND
from activation_extraction.store.folder import (
    ANY,
    Attempts,
    ChangedError,
    Folder,
    FolderError,
)
from activation_extraction.store.local_files import append_line

GOOGLE, S3, AZURE = BUCKETS = ["gs://bucket/run", "s3a://bucket/run", "az://bucket/run"]
MIB = 2**20


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(folder_module, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(folder_module, "MAX_PAUSE", 0.01)


@pytest.fixture(params=[*BUCKETS, "gateway", "folder", "file://"])
def folder(request, bucket, monkeypatch, tmp_path):
    """A folder that does not exist yet."""
    urls = {"folder": f"{tmp_path}/a b%c/run", "file://": f"file://{tmp_path}/run", "gateway": S3}
    with gateway() as server:
        if request.param == "gateway":
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
        yield Folder(urls.get(request.param, request.param), patience_seconds=20)


def test_a_write_is_conditional_on_what_stands_there(folder):
    parts = [b"one ", memoryview(b""), np.arange(2, dtype=np.int16)]
    first = folder.write("file", parts, None)
    assert folder.read_with_version("file") == (b"one \0\0\1\0", first)
    with pytest.raises(ChangedError, match="writing file: is another version"):
        folder.write("file", b"two", None)
    second = folder.write("file", b"two", first)
    assert second not in (None, first) and folder.listing()["file"] == (3, second)
    for name in ("file", "other"):
        told = f"{folder.url}: writing {name}: is another version now"
        with pytest.raises(ChangedError, match=told) as raised:
            folder.write(name, b"three", first)
        assert not raised.value.is_permanent
    assert folder.read("file", version=second) == b"two"
    assert folder.head("file") == (3, second) and folder.head("other") is None
    assert folder.read_range("file", 1, 3, second) == b"wo"
    for read in (folder.read, lambda *_, version: folder.read_range("file", 0, 1, version)):
        with pytest.raises(ChangedError, match="reading file: is another version now"):
            read("file", version=first)
    folder.write("file", b"", ANY)
    assert folder.head("file") == folder.listing()["file"]
    folder.write("new", b"4", ANY)
    assert folder.files() == {"file": 0, "new": 1} and folder.num_failed_attempts == 0
    folder.remove("file")
    folder.remove("file")
    assert folder.files() == {"new": 1}


@pytest.mark.parametrize("ask", [Folder.head, Folder.read_with_version, Folder.write])
def test_a_write_to_google_is_conditional_on_the_generation_that_was_seen(bucket, ask):
    """Somebody has written the same content again since: the ETag is the same."""
    folder = Folder(GOOGLE, patience_seconds=20)
    seen = folder.write("file", b"one", None)
    if ask is not Folder.write:
        _, seen = ask(folder, "file")
    bucket.put("run/file", b"one")
    assert folder.listing()["file"].version == seen
    for version in (seen, copy.deepcopy(seen)):  # as the dataclasses copy it that hold it
        bucket.requests.clear()
        with pytest.raises(ChangedError, match="writing file: is another version now"):
            folder.write("file", b"two", version)
        assert bucket.requests == [("PUT", "run/file")]
    assert folder.read("file") == b"one"


def test_ranges_folders_sizes_and_what_is_missing(folder):
    assert folder.listing() == {} and folder.read("file") is None is folder.read_range("file", 1, 2)
    child = folder.child("a b%c").child("ü")
    child.write("x#?y", b"0123456789", None)
    cases = {(2, 4): b"23", (8, 12): b"89", (3, 3): b"", (4, 3): b"", (10, 12): b""}
    assert {span: bytes(child.read_range("x#?y", *span)) for span in cases} == cases
    assert child.read("x#?y", max_bytes=10) == b"0123456789"
    with pytest.raises(FolderError, match="x#.y: has 10 bytes, expected at most 9"):
        child.read("x#?y", max_bytes=9)
    folder.write("file", b"", None)
    assert [*folder.listing()] == ["a b%c", "file"] and folder.files() == {"file": 0}
    assert child.files() == {"x#?y": 10} and folder.child("") is folder
    assert child.url == f"{folder.url}/a b%c/ü"


def test_a_listing_has_no_marker_and_an_object_is_one_request(bucket):
    bucket.put("run/", b"")  # as consoles make for an empty folder
    bucket.put("run2/other", b"1")
    for url in BUCKETS:
        bucket.requests.clear()
        Folder(url).write("file", [b"x" * MIB] * 20, ANY)
        assert [method for method, _ in bucket.requests] == ["PUT"]
        assert Folder(url).files() == {"file": 20 * MIB}
        assert [*Folder(url.removesuffix("/run")).listing()] == ["run", "run2"]


@pytest.mark.parametrize("ignored", [None, "If-Match", "If-None-Match"])
def test_each_condition_is_tried_before_it_is_relied_on(bucket, monkeypatch, ignored):
    """A store may know one of them only. The file that it is tried with is gone afterwards."""
    original = Bucket.write

    def forgetful(self, name, parts, expected):
        kind = "If-None-Match" if expected is None else "If-Match"
        return original(self, name, parts, ANY if kind == ignored else expected)

    monkeypatch.setattr(Bucket, "write", forgetful)
    for url in BUCKETS:
        if ignored:
            told = "a second write of .write_test_.*the store ignores If-None-Match or If-Match"
            with pytest.raises(InputError, match=told):
                Folder(url).check_conditions()
        else:
            Folder(url).check_conditions()
        assert Folder(url).files() == {}


def test_a_gateway_whose_other_host_has_its_own_etags_is_refused(monkeypatch):
    with gateway() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.tag = '"of the other host"'
        told = "has one ETag where it is written and another one where it is read"
        with pytest.raises(InputError, match=told):
            Folder(S3).check_conditions()
        assert server.objects() == {}


ASK = {
    "listing": lambda folder: folder.files(),
    "reading file": lambda folder: folder.read("file"),
    "writing file": lambda folder: folder.write("file", b"1", None),
    "writing new": lambda folder: folder.write("new", b"1", ANY),
    "deleting file": lambda folder: folder.remove("file"),
}


@pytest.mark.parametrize("url", BUCKETS)
@pytest.mark.parametrize(
    "fault", ["503", "429", "409", "400 RequestTimeout", "400 IncompleteBody", "reset", "lost"]
)
def test_a_conditional_write_is_sent_once_and_then_unsure(bucket, url, fault, lines):
    folder = Folder(url, 20)
    bucket.faults, bucket.fault_rate = (fault,), 1.0
    with pytest.raises(ChangedError, match=f"{url}: writing file: ") as raised:
        folder.write("file", b"content", None)
    assert not raised.value.is_permanent and folder.num_failed_attempts == 1
    assert bucket.failed == {fault: 1}
    ((_, line),) = lines
    assert line.endswith("; looking at what is there now")
    bucket.fault_rate = 0
    assert folder.read("file") == (b"content" if fault == "lost" else None)


@pytest.mark.parametrize("url", BUCKETS)
@pytest.mark.parametrize("fault", ["503", "lost"])
def test_a_deletion_is_sent_once_where_a_second_one_could_remove_another_file(
    bucket, monkeypatch, url, fault
):
    folder, faults, requests = Folder(url, 20), [], []

    def choose_fault():
        requests.append(None)
        return faults.pop() if faults else None

    folder.write("file", b"1", None)
    monkeypatch.setattr(bucket, "choose_fault", choose_fault)
    faults.append(fault)
    assert folder.remove_once("file") == (fault == "lost")
    assert len(requests) == 2 and bucket.requests[-1][0] == "HEAD"
    assert folder.remove_once("file") and folder.remove_once("file")
    assert len(requests) == 4 and folder.files() == {}


def test_what_may_pass_is_retried_and_every_streak_of_failures_is_one_line(
    bucket, monkeypatch, lines
):
    """The repetitions that obstore makes by itself are turned off."""
    monkeypatch.setattr(bucket_module, "RETRIES", 0)
    folder, faults = Folder(GOOGLE, 600, flag="--some_flag"), []
    monkeypatch.setattr(bucket, "choose_fault", lambda: faults.pop() if faults else None)
    for name in ASK.keys() - {"writing file"}:
        faults, before = (
            ["429", "400 RequestTimeout", "lost", "reset", "503"],
            folder.num_failed_attempts,
        )
        ASK[name](folder)
        assert not faults and folder.num_failed_attempts == before + 5
        reason = f"{name} failed (ServiceUnavailable: no); trying again for up to 600 s"
        assert lines == [("extract_activations", f"{GOOGLE}: {reason} (--some_flag)")]
        lines.clear()
    faults = ["503"] * 10**6
    with pytest.raises(FolderError, match=r"listing kept failing for \d+ s \(--some_flag\): Serv"):
        Folder(GOOGLE, 1, flag="--some_flag").files()


@pytest.mark.parametrize("fault", ["half", "truncated"])
def test_an_answer_that_stops_in_the_middle_is_asked_for_again(bucket, monkeypatch, fault):
    bucket.put("run/file", b"x" * MIB)
    faults = [fault]
    monkeypatch.setattr(bucket_module, "READ_TIMEOUT", 0.2)
    monkeypatch.setattr(bucket, "choose_fault", lambda: faults.pop() if faults else None)
    assert Folder(GOOGLE, patience_seconds=60).read("file") == b"x" * MIB and not faults


S3_NEEDS = "s3:ListBucket on the bucket; s3:GetObject, s3:PutObject and s3:DeleteObject"
REFUSALS = [
    (GOOGLE, "403", "permission denied (Forbidden: no); needed: roles/storage.objectUser"),
    (S3, "403", f"permission denied (Forbidden: no); needed: {S3_NEEDS}"),
    (GOOGLE, "401", "(Unauthorized: no); run `gcloud auth application-default login`"),
    (S3, "401", "invalid or have expired (Unauthorized: no); set AWS_ACCESS_KEY_ID"),
    (AZURE, "403", "permission denied (Forbidden: no); needed: the role Storage Blob Data Contrib"),
    (
        AZURE,
        "401",
        "(Unauthorized: no); set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_K",
    ),
    (
        S3,
        "301",
        "in another region or at another address (redirected without an address); AWS_REG",
    ),
    (S3, "400 AuthorizationHeaderMalformed", "AWS_REGION must be the region of the bucket"),
    (S3, "400 ExpiredToken", "invalid or have expired (ExpiredToken: no); set AWS_ACCESS_KEY_ID"),
    (S3, "403 InvalidAccessKeyId", "invalid or have expired (InvalidAccessKeyId: no)"),
    (AZURE, "403 AuthenticationFailed", "invalid or have expired (AuthenticationFailed: no)"),
    (AZURE, "409 BlobImmutableDueToPolicy", "BlobImmutableDueToPolicy: no"),
    ("gs://elsewhere/run", None, "no such bucket: elsewhere"),
    ("s3://elsewhere/run", None, "no such bucket: elsewhere"),
    ("az://elsewhere/run", None, "no such bucket: elsewhere"),
]


@pytest.mark.parametrize("url,fault,message", REFUSALS)
def test_a_refusal_names_the_request_and_what_that_store_needs(bucket, url, fault, message):
    if fault:
        bucket.faults, bucket.fault_rate = (fault,), 1.0
    folder = Folder(url, patience_seconds=20)
    for name, ask in ASK.items():
        with pytest.raises(FolderError) as raised:
            ask(folder)
        told = str(raised.value)
        assert told.startswith(f"{url}: {name}: ") and message in told
        assert "Signature" not in told and "127.0.0.1" not in told
        assert raised.value.is_permanent and folder.num_failed_attempts == 0


def test_a_bucket_that_refuses_is_told_in_one_line_before_the_model_is_read(
    demo_inputs, bucket, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("activation_extraction.run.prepare.prepare_model", None)
    bucket.faults, bucket.fault_rate = ("403",), 1.0
    given = "--upload_to_gcs", "--gcs_bucket", "bucket", "--gcs_prefix", "run"
    assert main(*flags_for(demo_inputs, tmp_path / "out", *given)) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: ") and "permission denied" in error
    assert not (tmp_path / "out").exists()


# What obstore says in its errors stands after the URL, and may stand in the URL as well.
WORDS = (
    "NoSuchBucket ContainerNotFound 169.254.169.254 metadata.google.internal token request "
    "status code: 404 TimedOut <Code>AccessDenied</Code>"
)
STRUCTURE = 'Debug source: Generic {", inner: Status { status: 404, body: None, }, }'


@pytest.mark.parametrize("url", BUCKETS)
@pytest.mark.parametrize("words", [WORDS, STRUCTURE])
def test_words_in_a_name_do_not_decide_what_a_failure_means(bucket, monkeypatch, url, words, lines):
    monkeypatch.setattr(bucket_module, "RETRIES", 0)
    folder, faults = Folder(f"{url}/{words}", 600), []
    monkeypatch.setattr(bucket, "choose_fault", lambda: faults.pop() if faults else None)
    assert folder.read(words) is None and folder.files() == {}
    folder.write(words, b"1", None)
    with pytest.raises(ChangedError):
        folder.write(words, b"2", None)
    for ask in (folder.files, lambda: folder.read(words), lambda: folder.write(words, b"1", ANY)):
        lines.clear()
        faults = ["503"]
        ask()
        ((_, line),) = lines
        assert not faults and "(ServiceUnavailable: no); trying again" in line
    folder.remove(words)
    assert folder.files() == {}


CONNECTION = (
    "DefaultEndpointsProtocol=http;AccountName=account;AccountKey=c2VjcmV0;BlobEndpoint={};"
)
REACHED = [  # a URL, and the variables that lead to its store; {} is the address
    ("s3://bucket", {"AWS_ENDPOINT_URL": "{}/"}),
    ("s3://bucket", {"AWS_ENDPOINT_URL_S3": "{}", "AWS_ENDPOINT_URL": "http://sts.invalid"}),
    ("s3://bucket", {"AWS_ENDPOINT": "{}", "AWS_ALLOW_HTTP": "true"}),
    ("s3://bucket", {"AWS_ENDPOINT": "{}"}),
    ("az://bucket", {"AZURE_ENDPOINT": "{}/account"}),
    ("az://bucket", {"AZURE_STORAGE_SERVICE_ENDPOINT": "{}/account"}),
    ("az://bucket", {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION.format("{}/account")}),
    (
        "abfss://bucket@account.dfs.core.windows.net",
        {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION.format("{}/account/")},
    ),
    (
        "az://bucket",
        {
            "AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint={}/account;"
            "SharedAccessSignature=sv=1&sig=a%3D"
        },
    ),
    (
        "az://bucket",
        {
            "AZURE_STORAGE_ENDPOINT": "{}/account",
            "AZURE_STORAGE_ACCOUNT": "account",
            "AZURE_STORAGE_KEY": "c2VjcmV0",
        },
    ),
    ("gs://bucket", {"STORAGE_EMULATOR_HOST": "{}/"}),
]


@pytest.mark.parametrize("url,variables", REACHED)
def test_every_variable_that_names_an_address_or_a_key_is_used(bucket, monkeypatch, url, variables):
    address = bucket.environment["AWS_ENDPOINT_URL"]
    replaced = {"STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"}
    if "AZURE_ENDPOINT" not in variables and "AZURE_STORAGE_SERVICE_ENDPOINT" not in variables:
        replaced |= {"AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"}
    for name in replaced:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(address))
    folder = Folder(f"{url}/run", 20)
    folder.check_conditions()
    folder.write("file", b"1", None)
    assert bucket.objects() == {"run/file": b"1"} and folder.num_failed_attempts == 0


CLOUDS = {
    "data@acct.dfs.core.windows.net": "https://acct.blob.core.windows.net",
    "data@acct.dfs.core.chinacloudapi.cn": "https://acct.blob.core.chinacloudapi.cn",
    "data@acct.blob.core.usgovcloudapi.net": "https://acct.blob.core.usgovcloudapi.net",
    "data@acct.z1.dfs.storage.azure.net": "https://acct.z1.blob.storage.azure.net",
}


@pytest.mark.parametrize("place,address", CLOUDS.items())
def test_the_host_in_a_url_names_the_account_and_its_cloud(monkeypatch, place, address):
    monkeypatch.delenv("AZURE_STORAGE_ENDPOINT", raising=False)
    settings = AZURE_KIND.make_client_arguments(place)
    assert (settings["container_name"], settings["account_name"]) == ("data", "acct")
    assert settings["endpoint"] == address


UNUSABLE = [
    (S3, "AWS_ENDPOINT_URL_S3", "minio:9000", "AWS_ENDPOINT_URL_S3 is 'minio:9000', expected http"),
    (GOOGLE, "STORAGE_EMULATOR_HOST", "http://", "STORAGE_EMULATOR_HOST is 'http://', expected"),
    (AZURE, "AZURE_STORAGE_ENDPOINT", "ftp://a/b", "AZURE_STORAGE_ENDPOINT is 'ftp://a/b', expec"),
    (
        AZURE,
        "AZURE_STORAGE_CONNECTION_STRING",
        "secret",
        "has neither AccountName nor BlobEndpoint",
    ),
    (
        AZURE,
        "AZURE_STORAGE_CONNECTION_STRING",
        "AccountName=a",
        "has neither AccountKey nor Shared",
    ),
    (
        "abfss://b@other.dfs.core.windows.net/r",
        "AZURE_STORAGE_CONNECTION_STRING",
        CONNECTION.format("http://a"),
        "is for the account account, expected other as in the URL",
    ),
    (
        AZURE,
        "AZURE_STORAGE_ACCOUNT_KEY",
        "*",
        "Invalid Access Key: Invalid symbol 42, offset 0.; se",
    ),
]


@pytest.mark.parametrize("url,variable,value,message", UNUSABLE)
def test_settings_that_cannot_work_are_not_retried(
    bucket, monkeypatch, url, variable, value, message
):
    monkeypatch.setenv(variable, value)
    folder = Folder(url)
    with pytest.raises(FolderError, match=re.escape(message)) as raised:
        folder.files()
    assert (
        raised.value.is_permanent
        and folder.num_failed_attempts == 0
        and "secret" not in str(raised.value)
    )


def test_what_never_worked_and_cannot_work_is_not_retried(bucket, monkeypatch):
    """A store that has worked is asked again, because its network may be the reason."""
    address = bucket.environment["AWS_ENDPOINT_URL"]
    folder = Folder(S3, 600)
    monkeypatch.setenv("AWS_ENDPOINT_URL", address.replace("http", "https"))
    with pytest.raises(FolderError, match="does not speak TLS") as raised:
        folder.files()
    assert raised.value.is_permanent and folder.num_failed_attempts == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    folder.files()
    monkeypatch.setattr(
        folder_module.time, "sleep", lambda _: monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", address.replace("http", "https"))
    assert folder.files() == {} and folder.num_failed_attempts == 1


def test_a_machine_without_credentials_is_told_how_to_give_some(bucket, monkeypatch):
    """The server of credentials answers as a store without the bucket would."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", bucket.environment["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(FolderError, match="no credentials were found, nor given by") as raised:
        Folder(S3).files()
    assert raised.value.is_permanent and "set AWS_ACCESS_KEY_ID" in str(raised.value)


# Errors of obstore, as it prints them, that no server of a test can cause. The parts of a structure
# that nothing reads are left out.
REQUEST = """Generic S3 error: Error performing GET https://host/b/a in 1ms

Debug source:
Generic {
    store: "S3",
    source: %s
    uri: Some(
        https://host/b/a,
    ),
    inner: %s
}"""
CONNECT = """Http(
    HttpError {
        kind: Connect,
        source: reqwest::Error {
            kind: Request,
            source: hyper_util::client::legacy::Error(
                Connect,
                %s
"""
DNS = """ConnectError(
    "dns error",
    Custom {
        kind: Uncategorized,
        error: "failed to lookup address information: %s",
    },"""
STATUS = """Status {
    status: 400,
    body: Some(
        "%s",
    ),
},"""
DELETED = """Generic S3 error: DeleteObjects request failed for key a: no (code: %s)

Debug source:
Generic {
    store: "S3",
    source: DeleteFailed {
        path: "a",
        code: "%s",
        message: "not \\"here\\"",
    },
}"""
LOOKUP = "failed to lookup address information: "
UNKNOWN, LATER = "Name or service not known", "Temporary failure in name resolution"
ISSUER = "Custom {\n    error: InvalidCertificate(\n        UnknownIssuer,\n    ),\n},"
INVALID_GRANT = r"{\"error\":\"invalid_grant\",\"error_description\":\"Token\\nhas expired\"}"
PRINTED = [
    (REQUEST % ("", CONNECT % DNS % UNKNOWN), FailureKind.UNREACHABLE, LOOKUP + UNKNOWN),
    (REQUEST % ("", CONNECT % DNS % LATER), FailureKind.MAY_PASS, LOOKUP + LATER),
    (
        REQUEST % ("", CONNECT % ISSUER),
        FailureKind.UNREACHABLE,
        "the certificate of the server is not valid (UnknownIssuer)",
    ),
    (
        REQUEST % ("TokenRequest {", STATUS % INVALID_GRANT),
        FailureKind.NO_CREDENTIALS,
        "invalid_grant: Token",
    ),
    (DELETED % (2 * ("AccessDenied",)), FailureKind.FORBIDDEN, 'AccessDenied: not "here"'),
    (DELETED % (2 * ("InternalError",)), FailureKind.MAY_PASS, 'InternalError: not "here"'),
    (DELETED % ("503", "503"), FailureKind.MAY_PASS, '503: not "here"'),
    ("Generic S3 error: Cannot parse:\n  key", FailureKind.UNUSABLE, "Cannot parse: key"),
]


@pytest.mark.parametrize("text,kind,reason", PRINTED)
def test_an_error_of_obstore_has_a_kind_and_a_reason_of_one_line(text, kind, reason):
    assert failure_of_obstore(GenericError(text))[:2] == (kind, reason)


def test_a_failed_check_of_conditions_is_told_once_and_nothing_else_waits(
    bucket, monkeypatch, lines
):
    monkeypatch.setattr(Bucket, "remove", None)
    bucket.faults, bucket.fault_rate = ("301",), 1.0
    with pytest.raises(FolderError, match=r"s3a://bucket/run: writing \.write_test_.*AWS_REGION"):
        Folder(S3, 600).check_conditions()
    assert not lines and bucket.failed == {"301": 1}

    answers = iter(["1"])  # the first write succeeds

    def write(*_):
        version = next(answers, None)
        if version is None:
            raise FolderError("an outage", is_permanent=False)
        return version

    monkeypatch.setattr(Bucket, "write", write)
    with pytest.raises(FolderError, match=r"writing \.write_test_.* kept failing for "):
        Folder(S3, 0.5).check_conditions()
    assert len(lines) == 1


@pytest.mark.parametrize("url", BUCKETS)
def test_a_test_file_that_cannot_be_deleted_is_left_and_named(bucket, monkeypatch, lines, url):
    """Azurite answers so if a shared access signature is for an account."""

    def refuse(*_):
        raise FolderError("500 Internal Server Error", is_permanent=False)

    monkeypatch.setattr(Bucket, "remove", refuse)
    Folder(url, 600).check_conditions()
    ((_, failed), (_, left)) = lines
    assert "500 Internal Server Error" in failed
    assert re.search(r"/\.write_test_\w+: this test file may not have been deleted", left)


@pytest.mark.parametrize(
    "url,variable",
    [("gs://b/run", "STORAGE_EMULATOR_HOST"), ("s3://b/run", "AWS_ENDPOINT_URL")],
)
def test_nobody_listens_and_nobody_answers(bucket, monkeypatch, url, variable):
    """What is silent is given up after the patience."""
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(FolderError, match="kept failing for .*: Connection refused"):
        Folder(url, patience_seconds=0.3).files()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv(variable, f"http://127.0.0.1:{silent.getsockname()[1]}")
        folder = Folder(url, patience_seconds=0.2)
        with pytest.raises(FolderError, match="listing kept failing for .* s: no answer"):
            folder.files()
        with pytest.raises(ChangedError, match="writing file: no answer"):
            ASK["writing file"](folder)


@pytest.mark.parametrize("url", BUCKETS)
def test_a_store_that_takes_the_body_and_never_answers_is_given_up_after_the_patience(
    bucket, monkeypatch, url
):
    """However large the body is: here, a slow line would have years to send it."""
    answers = threading.Event()
    bucket.before = lambda method, name: method != "PUT" or answers.wait(600)
    for module in (folder_module, bucket_module):
        monkeypatch.setattr(module, "MIN_BYTES_PER_SECOND", 0.01)
    folder, data = Folder(url, patience_seconds=1, flag="--some_flag"), b"x" * 3 * MIB
    try:
        with pytest.raises(ChangedError, match=r"writing file: no answer for \d+ s after the"):
            folder.write("file", data, None)
        told = r"writing file kept failing for \d+ s \(--some_flag\): no answer for \d+ s after"
        with pytest.raises(FolderError, match=told):
            folder.write("file", data, ANY)
    finally:
        answers.set()


@pytest.mark.rare
def test_sixteen_uploads_that_share_16_mbit_per_second_succeed_at_the_first_attempt(bucket):
    """Each takes longer than the patience: the line has other bytes to carry."""
    rate, patience, size = 2e6, 5, 2 * MIB  # bytes per second, seconds, bytes of an upload
    lock, line_is_free_at = threading.Lock(), [time.monotonic()]

    def received(count):
        with lock:
            line_is_free_at[0] = max(line_is_free_at[0], time.monotonic()) + count / rate
            until = line_is_free_at[0]
        time.sleep(max(0, until - time.monotonic()))

    bucket.keep_little_unread()
    bucket.received = received
    folder = Folder(S3, patience)
    began = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        [*threads.map(lambda name: folder.write(name, bytes(size), None), map(str, range(16)))]
    assert time.monotonic() - began >= 16 * size / rate > 3 * patience
    assert folder.num_failed_attempts == 0 and [*folder.files().values()] == [size] * 16


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed for `Attempts` and `Patience`, in a list of one number."""
    seconds = [0.0]

    def sleep(duration):
        seconds[0] += duration

    fake = SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep)
    for module in (folder_module, sending):
        monkeypatch.setattr(module, "time", fake)
    return seconds


def test_all_attempts_at_a_write_share_one_time_that_grows_in_proportion_to_its_bytes(clock):
    folder = Folder(GOOGLE, patience_seconds=300)
    longest = []
    for size in (0, MIB, 2 * MIB, 16 * MIB):
        patience = folder.patience_for(bytes(size))
        patience.add(1e9)
        longest.append(patience.deadline - clock[0])
    # Sixteen at once on a line of 16 Mbit/s.
    assert longest == [300 + size * 16 * 8 / 16e6 for size in (0, MIB, 2 * MIB, 16 * MIB)]
    patience = folder.patience_for(bytes(MIB))
    attempts = Attempts(folder, "writing file", patience)
    with pytest.raises(FolderError, match=r"writing file kept failing for 300 s: no"):
        while True:
            clock[0] = min(clock[0] + 90, patience.deadline)  # as `watched` ends an attempt
            attempts.failed("no")
    # What is not a write may take long, and is tried again when it fails.
    attempts = Attempts(folder, "reading file")
    clock[0] += 10**6
    attempts.failed("no")


def test_a_write_may_send_for_longer_than_its_patience_but_not_for_ever(monkeypatch):
    """Also where the system does not tell whether it sends."""
    for answer in (True, None):
        answered, asked = threading.Event(), count(1)

        def is_sending(answered=answered, asked=asked, answer=answer):
            if next(asked) == 20:
                answered.set()
            return answer

        monkeypatch.setattr(sending, "is_sending", is_sending)
        patience = sending.Patience(0.02, 600)
        assert sending.watched(lambda e=answered: e.wait(600), patience, "") is True
        with pytest.raises(FolderError, match="no answer within") as raised:
            sending.watched(threading.Event().wait, sending.Patience(0.02, 0.05), "")
        assert not raised.value.is_permanent


@pytest.mark.parametrize(
    "is_sending,told",
    [
        (True, "bytes are being sent"),
        (False, "everything is sent, and the store has not answered yet"),
        (None, "there is no answer yet"),
    ],
)
def test_a_write_that_waits_for_minutes_is_logged(monkeypatch, is_sending, told):
    assert sending.LOGGED_AFTER == 60
    monkeypatch.setattr(sending, "is_sending", lambda: is_sending)
    monkeypatch.setattr(sending, "CHECK_SECONDS", 0.001)
    monkeypatch.setattr(sending, "LOGGED_AFTER", 0.001)
    enough = threading.Event()

    def note(level, text, *values):
        lines.append(text % values)
        if len(lines) == 3:
            enough.set()

    lines = []
    monkeypatch.setattr(sending.log, "log", note)
    assert sending.watched(lambda: enough.wait(600), sending.Patience(600), "gs://b: writing x")
    pattern = rf"gs://b: writing x has been waiting for \d+ s: {told}"
    assert all(re.fullmatch(pattern, line) for line in lines)


def test_the_kernel_tells_whether_bytes_are_leaving():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as reader,
    ):
        client.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += client.send(bytes(MIB))
        while sending.is_sending() is not True:  # a look is shared for a moment
            time.sleep(0.01)
        while sent:
            sent -= len(reader.recv(sent))
        while sending.is_sending() is not False:
            time.sleep(0.01)


def test_links_are_not_written_through(tmp_path):
    """Somebody else may have put one into the folder."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("file", "metrics.jsonl"):
        (tmp_path / name).symlink_to(precious)
    folder = Folder(str(tmp_path))
    assert folder.read("file") == b"mine"
    for expected in (None, ANY, (folder.read_with_version("file") or (b"", ""))[1]):
        with pytest.raises(FolderError, match="writing file: is a symbolic link"):
            folder.write("file", b"other", expected)
    with pytest.raises(OSError, match="symbolic link"):
        append_line(tmp_path / "metrics.jsonl", "{}")
    assert precious.read_text() == "mine"


def test_a_local_file_is_complete_and_synced_before_it_has_its_name(tmp_path, monkeypatch):
    steps = []

    def note(name):
        action = getattr(os, name)

        def noted(*given):
            size = os.fstat(given[0]).st_size if name == "fsync" else 0
            steps.append(f"fsync of {size}" if size == 7 else name)
            return action(*given)

        monkeypatch.setattr(os, name, noted)

    for name in ("fsync", "link", "replace"):
        note(name)
    folder = Folder(f"{tmp_path}/new")
    first = folder.write("file", b"content", None)
    folder.write("file", b"another", first)
    whole = "fsync of 7"
    assert steps == [whole, "link", "fsync", whole, "replace", "fsync"]
    assert os.listdir(f"{tmp_path}/new") == ["file"]


def test_a_local_file_is_created_once_where_there_are_no_hard_links(tmp_path, monkeypatch):
    """It is so, too, if the name appears at the last moment."""

    def refuse(*paths):
        if paths[1].name == "file":
            paths[1].write_bytes(b"of another")
        raise OSError(errno.EPERM, "")

    monkeypatch.setattr(os, "link", refuse)
    folder = Folder(str(tmp_path))
    folder.write("new", b"1", None)
    with pytest.raises(ChangedError, match="writing file: is another version"):
        folder.write("file", b"mine", None)
    assert folder.read("file") == b"of another" and folder.files() == {"file": 10, "new": 1}


def test_any_other_url_is_only_read(tmp_path):
    url = f"memory://{tmp_path}/run"
    fsspec.filesystem("memory").pipe({f"{tmp_path}/run/a": b"123", f"{tmp_path}/run/b/c": b"1"})
    folder = Folder(url)
    assert folder.files() == {"a": 3} and [*folder.listing()] == ["a", "b"] and not folder.is_local
    assert folder.read_range("a", 1, 3) == b"23" and folder.head("a") == (3, None)
    assert folder.read("x") is None and folder.child("x").files() == {}
    with pytest.raises(FolderError, match="reading a: has 3 bytes, expected at most 2"):
        folder.read("a", max_bytes=2)
    for ask in (ASK["writing new"], ASK["deleting file"], Folder.check_conditions):
        with pytest.raises(InputError, match=f"{url}: .* cannot be written there; expected a loc"):
            ask(folder)
