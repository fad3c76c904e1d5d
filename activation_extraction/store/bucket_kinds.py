"""The kinds of buckets, Google Cloud Storage, S3 and Azure, with the settings to connect to each.

obstore reads most settings from the environment: keys, roles, regions and the credentials of a
machine. This module reads the environment variables that obstore ignores. It also finds the address
of the store, because obstore needs a setting to allow addresses with http://. bucket.py sends the
requests.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from activation_extraction.common.visible import plain_url

# Each tuple lists the environment variables for one setting: the address of a store, the name of an
# account, or the key of an account. The first variable that is set is used.
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
    """A kind of store: Google Cloud Storage, S3 or Azure.

    Attributes:
        client_class: Class of obstore whose objects are connected to a bucket.
        make_client_arguments: Function that takes the name of the bucket in a URL, and returns a
            dict with the arguments of `client_class`, by the names of its parameters. It raises
            ValueError if an environment variable cannot be used.
        max_request_bytes: Largest number of bytes that one request may write.
        permission_help: Permissions that a run needs, as text for messages.
        credential_help: Ways to provide credentials, as text for messages.
        address_help: Settings that determine the region and the address, as text for messages.
    """

    client_class: Callable[..., Any]
    make_client_arguments: Callable[[str], dict[str, Any]]
    max_request_bytes: int
    permission_help: str
    credential_help: str
    address_help: str


def _google_settings(bucket: str) -> dict[str, Any]:
    client_arguments: dict[str, Any] = {"bucket": bucket}
    environment_variable_name, emulator_address = _first_set("STORAGE_EMULATOR_HOST")
    if emulator_address:
        emulator_url = (
            emulator_address if "://" in emulator_address else f"http://{emulator_address}"
        )
        client_arguments["base_url"] = _checked_address(environment_variable_name, emulator_url)
        client_arguments["credential_provider"] = _no_token
    return client_arguments


def _no_token() -> dict[str, Any]:
    return {"token": "", "expires_at": None}


def _s3_settings(bucket: str) -> dict[str, Any]:
    # With this setting, obstore sends the SHA-256 of an upload, and S3 refuses the upload if the
    # SHA-256 of the received bytes differs.
    client_arguments = {"bucket": bucket, "checksum_algorithm": "SHA256"}
    environment_variable_name, endpoint_url = _first_set(*S3_ADDRESS)
    if endpoint_url:
        client_arguments["endpoint"] = _checked_address(environment_variable_name, endpoint_url)
    return client_arguments


def _azure_settings(bucket: str) -> dict[str, Any]:
    """Returns the arguments of AzureStore for a container, by name.

    Args:
        bucket: "CONTAINER", or "CONTAINER@ACCOUNT.dfs.core.windows.net" as in an abfss:// URL. The
            part after the @ determines the account and the address. Without it, environment
            variables determine them.

    Raises:
        ValueError: If an environment variable cannot be used, or if AZURE_STORAGE_CONNECTION_STRING
            is for another account than the ACCOUNT in `bucket`.
    """
    container_name, _, account_domain = bucket.partition("@")
    connection_string = os.environ.get(CONNECTION_STRING, "")
    if connection_string:
        client_arguments = _azure_connection(connection_string)
    else:
        _, account_name = _first_set(*AZURE_ACCOUNT)
        _, account_key = _first_set(*AZURE_KEY)
        client_arguments = {"account_name": account_name, "account_key": account_key}
    if account_domain:
        account_name = account_domain.partition(".")[0]
        if connection_string and client_arguments["account_name"] != account_name:
            raise ValueError(
                f"{CONNECTION_STRING} is for the account {client_arguments['account_name']}, "
                f"expected {account_name} as in the URL"
            )
        client_arguments["account_name"] = account_name
        client_arguments.setdefault(
            "endpoint", f"https://{account_domain.replace('.dfs.', '.blob.', 1)}"
        )
    environment_variable_name, endpoint_url = _first_set(*AZURE_ADDRESS)
    if endpoint_url:
        client_arguments["endpoint"] = _checked_address(environment_variable_name, endpoint_url)
    # Empty settings are left out, because obstore has defaults for them, such as the account of an
    # emulator.
    nonempty_arguments = {
        argument_name: argument for argument_name, argument in client_arguments.items() if argument
    }
    return {"container_name": container_name, **nonempty_arguments}


def _azure_connection(connection_string: str) -> dict[str, str]:
    """Converts a connection string to arguments of AzureStore, by name.

    The Azure portal and the program `az` write such strings.

    Args:
        connection_string: Fields of the form NAME=SETTING, separated by semicolons.

    Raises:
        ValueError: If fields are missing, or the address is not a URL.
    """
    setting_by_field = {}
    for field_text in connection_string.strip(" ;\n").split(";"):
        field_name, _, setting_value = field_text.partition("=")
        setting_by_field[field_name] = setting_value
    if setting_by_field.get("UseDevelopmentStorage", "").lower() == "true":
        return {"account_name": "devstoreaccount1", "use_emulator": "true"}
    endpoint_url = setting_by_field.get("BlobEndpoint", "")
    account_name = setting_by_field.get("AccountName", "")
    if not endpoint_url:
        if not account_name:
            raise ValueError(
                f"{CONNECTION_STRING} has neither AccountName nor BlobEndpoint, expected one of "
                "them, as in the Azure portal"
            )
        url_protocol = setting_by_field.get("DefaultEndpointsProtocol", "https")
        endpoint_suffix = setting_by_field.get("EndpointSuffix", "core.windows.net")
        endpoint_url = f"{url_protocol}://{account_name}.blob.{endpoint_suffix}"
    client_arguments = {
        "endpoint": _checked_address(f"BlobEndpoint in {CONNECTION_STRING}", endpoint_url),
        "account_name": account_name or (urlsplit(endpoint_url).hostname or "").partition(".")[0],
        "account_key": setting_by_field.get("AccountKey", ""),
        "sas_key": setting_by_field.get("SharedAccessSignature", "").removeprefix("?"),
    }
    if not client_arguments["account_key"] and not client_arguments["sas_key"]:
        raise ValueError(
            f"{CONNECTION_STRING} has neither AccountKey nor SharedAccessSignature, expected one "
            "of them, as in the Azure portal"
        )
    return client_arguments


def _first_set(*environment_variable_names: str) -> tuple[str, str]:
    """Returns the first of several environment variables that is set and not empty.

    Args:
        environment_variable_names: Names of the environment variables.

    Returns:
        A tuple of the name and the value of the variable. Both are "" if there is no such variable.
    """
    for environment_variable_name in environment_variable_names:
        if variable_value := os.environ.get(environment_variable_name, ""):
            return environment_variable_name, variable_value
    return "", ""


def _checked_address(environment_variable_name: str, address: str) -> str:
    """Checks the address of a store, and returns it without a slash at its end.

    Args:
        environment_variable_name: Name of the environment variable that contains the address, for
            the message.
        address: Address of a store.

    Raises:
        ValueError: If the address is not an http:// or https:// URL.
    """
    with suppress(ValueError):  # `url.port` raises ValueError if the port is not a number
        address_parts = urlsplit(address)
        if (
            address_parts.scheme in ("http", "https")
            and address_parts.hostname
            and address_parts.port != 0
        ):
            return address.rstrip("/")
    raise ValueError(
        f"{environment_variable_name} is {plain_url(address)!r}, "
        "expected http://HOST or https://HOST"
    )


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
# Scheme of a bucket's URL -> kind of the bucket.
BUCKET_KINDS = {
    **dict.fromkeys(("gs", "gcs"), GOOGLE),
    **dict.fromkeys(("s3", "s3a"), S3),
    **dict.fromkeys(("az", "abfs", "abfss"), AZURE),
}
