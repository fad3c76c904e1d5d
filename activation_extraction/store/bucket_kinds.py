"""The kinds of buckets, which are Google Cloud Storage, S3 and Azure, and how each is reached.

obstore reads most settings from the environment by itself: keys, roles, regions and the credentials
of a machine. This module adds the ones that obstore lacks, and finds the address of the store,
because obstore needs a setting to allow addresses with http://.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from activation_extraction.common.visible import plain_url

# Environment variables with the same meaning, of which the first one that is set counts.
S3_ADDRESS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
AZURE_ADDRESS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT")
AZURE_ACCOUNT = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
AZURE_KEY = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_KEY",
)
CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"


class BucketKind(NamedTuple):
    """A kind of store.

    Attributes:
        store: The obstore class that connects to a bucket.
        settings: Function that gets the bucket in a URL, and returns the arguments of `store` by
            name. It raises ValueError if an environment variable cannot be used.
        max_request_bytes: Largest number of bytes that one request may write.
        permission: The permissions that a run needs, for a message.
        renew: The ways to provide credentials, for a message.
        address: The settings that determine the region and the address, for a message.
    """

    store: Callable[..., Any]
    settings: Callable[[str], dict[str, Any]]
    max_request_bytes: int
    permission: str
    renew: str
    address: str


def _google_settings(bucket: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"bucket": bucket}
    variable, emulator = _first_set("STORAGE_EMULATOR_HOST")
    if emulator:
        address = emulator if "://" in emulator else f"http://{emulator}"
        settings["base_url"] = _checked_address(variable, address)
        settings["credential_provider"] = _no_token
    return settings


def _no_token() -> dict[str, Any]:
    return {"token": "", "expires_at": None}


def _s3_settings(bucket: str) -> dict[str, Any]:
    settings = {"bucket": bucket, "checksum_algorithm": "SHA256"}  # S3 compares the checksum
    variable, address = _first_set(*S3_ADDRESS)
    if address:
        settings["endpoint"] = _checked_address(variable, address)
    return settings


def _azure_settings(bucket: str) -> dict[str, Any]:
    """Returns the settings of a container.

    Args:
        bucket: "CONTAINER", or "CONTAINER@ACCOUNT.dfs.core.windows.net" as in an abfss:// URL. The
            host determines the account and the cloud; without a host, the environment does.

    Raises:
        ValueError: An environment variable cannot be used, or names another account than the host.
    """
    container, _, host = bucket.partition("@")
    connection = os.environ.get(CONNECTION_STRING, "")
    if connection:
        settings = _azure_connection(connection)
    else:
        account, key = _first_set(*AZURE_ACCOUNT)[1], _first_set(*AZURE_KEY)[1]
        settings = {"account_name": account, "account_key": key}
    if host:
        account = host.partition(".")[0]
        if connection and settings["account_name"] != account:
            raise ValueError(
                f"{CONNECTION_STRING} is for the account {settings['account_name']}, expected "
                f"{account} as in the URL"
            )
        settings["account_name"] = account
        settings.setdefault("endpoint", f"https://{host.replace('.dfs.', '.blob.', 1)}")
    variable, address = _first_set(*AZURE_ADDRESS)
    if address:
        settings["endpoint"] = _checked_address(variable, address)
    # obstore finds by itself what is missing here, such as the account of an emulator.
    return {"container_name": container} | {
        name: value for name, value in settings.items() if value
    }


def _azure_connection(text: str) -> dict[str, str]:
    """Returns the settings in a connection string, whose fields the Azure portal and `az` write."""
    fields = dict(field.partition("=")[::2] for field in text.strip(" ;\n").split(";"))
    if fields.get("UseDevelopmentStorage", "").lower() == "true":
        return {"account_name": "devstoreaccount1", "use_emulator": "true"}
    address = fields.get("BlobEndpoint", "")
    account = fields.get("AccountName", "")
    if not address:
        if not account:
            raise ValueError(
                f"{CONNECTION_STRING} has neither AccountName nor BlobEndpoint, expected one of "
                "them, as in the Azure portal"
            )
        protocol = fields.get("DefaultEndpointsProtocol", "https")
        suffix = fields.get("EndpointSuffix", "core.windows.net")
        address = f"{protocol}://{account}.blob.{suffix}"
    settings = {
        "endpoint": _checked_address(f"BlobEndpoint in {CONNECTION_STRING}", address),
        "account_name": account or (urlsplit(address).hostname or "").partition(".")[0],
        "account_key": fields.get("AccountKey", ""),
        "sas_key": fields.get("SharedAccessSignature", "").removeprefix("?"),
    }
    if not settings["account_key"] and not settings["sas_key"]:
        raise ValueError(
            f"{CONNECTION_STRING} has neither AccountKey nor SharedAccessSignature, expected one "
            "of them, as in the Azure portal"
        )
    return settings


def _first_set(*variables: str) -> tuple[str, str]:
    """Returns the first of these variables that is set, and its value; "" if none is set."""
    for variable in variables:
        if value := os.environ.get(variable, ""):
            return variable, value
    return "", ""


def _checked_address(variable: str, address: str) -> str:
    """Returns an address without a slash at its end. Raises ValueError if it is not a URL."""
    with suppress(ValueError):  # the port is no number
        parts = urlsplit(address)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return address.rstrip("/")
    raise ValueError(f"{variable} is {plain_url(address)!r}, expected http://HOST or https://HOST")


GOOGLE = BucketKind(
    GCSStore,
    _google_settings,
    5 * 2**40,
    "roles/storage.objectUser on the bucket",
    "run `gcloud auth application-default login`, or name a service account's key in "
    "GOOGLE_APPLICATION_CREDENTIALS",
    "STORAGE_EMULATOR_HOST, if it is set, must be the address of the store",
)
S3 = BucketKind(
    S3Store,
    _s3_settings,
    5 * 2**30,
    "s3:ListBucket on the bucket; s3:GetObject, s3:PutObject and s3:DeleteObject on its objects",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
    "AWS_REGION must be the region of the bucket, and AWS_ENDPOINT_URL, if it is set, the address "
    "of its store",
)
AZURE = BucketKind(
    AzureStore,
    _azure_settings,
    5000 * 2**20,
    "the role Storage Blob Data Contributor on the container, or the key of the account in "
    "AZURE_STORAGE_ACCOUNT_KEY",
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, set "
    "AZURE_STORAGE_CONNECTION_STRING, or run `az login` and set AZURE_USE_AZURE_CLI=true",
    "AZURE_STORAGE_ACCOUNT_NAME, the host in the URL or AZURE_STORAGE_ENDPOINT must name the "
    "account",
)
BUCKET_KINDS = {
    **dict.fromkeys(("gs", "gcs"), GOOGLE),
    **dict.fromkeys(("s3", "s3a"), S3),
    **dict.fromkeys(("az", "abfs", "abfss"), AZURE),
}
