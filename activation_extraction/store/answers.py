"""Determines the kind of a failed request to a store: Google Cloud Storage, S3 or Azure.

A store gives the reason for a refusal as an HTTP status and as a code in the body of its answer.
The code is used if it is known, because stores use one status for different failures. Of an error
message of obstore, only the answer itself is parsed. The rest contains the URL, in which a user may
have chosen names that look like a part of an answer. bucket.py turns the kinds into exceptions.
"""

import http
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto
from html import unescape
from typing import NamedTuple
from urllib.parse import urlsplit

from obstore.exceptions import GenericError

# Environment variables that may contain the address of the server that provides a machine's
# credentials for S3. If a request to this server fails, credentials are missing, and the store has
# not been asked yet (see `_asks_for_credentials`). If the variables are not set, the address lies
# in 169.254.0.0/16, which is reachable only from the machine.
CREDENTIAL_ADDRESSES = ("AWS_METADATA_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
# Heading in the message of an obstore error. After it, obstore prints the failure as a Rust
# structure.
DETAILS = "\n\nDebug source:\n"


class FailureKind(Enum):
    """The kinds of reasons for which a request to a store fails.

    NO_CREDENTIALS, UNREACHABLE and UNUSABLE may be temporary if an earlier request to the same
    folder has succeeded, which shows that the address, settings and credentials were valid.

    Attributes:
        MISSING: The object does not exist.
        CHANGED: The request was conditional on a version of the object, or on its absence, and this
            condition is not met.
        NO_BUCKET: The bucket does not exist.
        CREDENTIALS: The store does not accept the credentials.
        NO_CREDENTIALS: No credentials are set, and the machine provides none.
        FORBIDDEN: The credentials are valid, but do not permit the request.
        ELSEWHERE: The bucket is in another region, or at another address.
        UNREACHABLE: No store answers at the address.
        UNUSABLE: obstore cannot use a setting of the user, or the answer of the store.
        REFUSED: The store would refuse the same request again.
        MAY_PASS: The same request may succeed later.
    """

    MISSING = auto()
    CHANGED = auto()
    NO_BUCKET = auto()
    CREDENTIALS = auto()
    NO_CREDENTIALS = auto()
    FORBIDDEN = auto()
    ELSEWHERE = auto()
    UNREACHABLE = auto()
    UNUSABLE = auto()
    REFUSED = auto()
    MAY_PASS = auto()


# Kinds of failures by the error code in the answer, for the error codes of Google Cloud Storage, S3
# and Azure that are more precise than the HTTP status.
FAILURE_KIND_BY_ERROR_CODE: Mapping[str, FailureKind] = {
    error_code: failure_kind
    for failure_kind, space_separated_error_codes in {
        FailureKind.CHANGED: "PreconditionFailed ConditionNotMet BlobAlreadyExists",
        FailureKind.NO_BUCKET: "NoSuchBucket ContainerNotFound",
        FailureKind.CREDENTIALS: (
            "ExpiredToken InvalidToken TokenRefreshRequired InvalidAccessKeyId "
            "SignatureDoesNotMatch AuthenticationFailed InvalidAuthenticationInfo"
        ),
        FailureKind.FORBIDDEN: "AccessDenied AllAccessDisabled PublicAccessNotPermitted",
        FailureKind.ELSEWHERE: "PermanentRedirect AuthorizationHeaderMalformed",
        FailureKind.REFUSED: "BlobArchived BlobImmutableDueToPolicy SnapshotsPresent",
        # These error codes are returned if the body of an upload arrives late or incomplete.
        FailureKind.MAY_PASS: "RequestTimeout IncompleteBody BadDigest XAmzContentSHA256Mismatch",
    }.items()
    for error_code in space_separated_error_codes.split()
}
# Kinds of failures by the HTTP status. `failure_kind_of` determines the kinds for all other
# statuses.
FAILURE_KIND_BY_HTTP_STATUS: Mapping[int, FailureKind] = {
    401: FailureKind.CREDENTIALS,
    403: FailureKind.FORBIDDEN,
    404: FailureKind.MISSING,
    412: FailureKind.CHANGED,
    501: FailureKind.REFUSED,
}


class Failure(NamedTuple):
    """The failure of a request to a store: its kind, and the reason in words.

    Attributes:
        kind: Kind of the failure, such as `FailureKind.MISSING`. It decides the exception to raise.
        reason: Reason for the user, as one line: the code and message of the store's answer or, if
            the store did not answer, the reason why it did not. It contains no URL and nothing else
            that may contain secrets.
        http_status: HTTP status of the store's answer; 0 if the store did not answer, or the status
            is unknown.
    """

    kind: FailureKind
    reason: str
    http_status: int = 0


def failure_kind_of(http_status: int, error_code: str = "") -> FailureKind:
    """Returns why a request failed, from the error code or else the HTTP status of the answer.

    Args:
        http_status: HTTP status of the store's answer, which is used if the error code is not one
            of FAILURE_KIND_BY_ERROR_CODE. 0 if only the error code is available.
        error_code: Error code in the body of the answer, such as "NoSuchBucket"; "" if the body
            contains no error code.
    """
    if error_code in FAILURE_KIND_BY_ERROR_CODE:
        return FAILURE_KIND_BY_ERROR_CODE[error_code]
    if http_status in FAILURE_KIND_BY_HTTP_STATUS:
        return FAILURE_KIND_BY_HTTP_STATUS[http_status]
    if 300 <= http_status < 400:
        return FailureKind.ELSEWHERE
    if 400 <= http_status < 500 and http_status not in (408, 409, 425, 429):
        return FailureKind.REFUSED
    return FailureKind.MAY_PASS


def failure_of_obstore(error: Exception) -> Failure:
    """Returns the reason why a request with obstore failed, from the exception that obstore raised.

    The message of the exception contains the answer of the store twice: within a sentence, and as a
    Rust structure with one field per line, in which strings are escaped. Only lines of the
    structure are parsed, because the sentence contains the URL.

    Args:
        error: Exception that a request with obstore has raised.
    """
    _, details_separator, error_details = str(error).rpartition(DETAILS)
    if not details_separator:
        error_details = ""
    answer_match = re.search(
        r'^ *inner: Status {\n *status: (\d+),\n *body: (?:None|Some\(\n *"(.*)",\n *\)),$',
        error_details,
        re.MULTILINE,
    )
    # obstore may delete an object by a request that contains a list of objects to delete. The
    # answer to such a request contains a result for each object of the list.
    deletion_match = re.search(
        r'^ *(?:source: )?DeleteFailed {\n *path: .*\n *code: "(.*)",\n *\w+: "(.*)",$',
        error_details,
        re.MULTILINE,
    )
    if answer_match:
        failure = _failure_of_answer(int(answer_match[1]), _unescaped(answer_match[2] or ""))
    elif deletion_match:
        error_code = _unescaped(deletion_match[1])
        error_text = _unescaped(deletion_match[2])
        http_status = int(error_code) if error_code.isdigit() else 0
        failure = Failure(
            failure_kind_of(http_status, error_code),
            _as_one_line(error_code, error_text),
            http_status,
        )
    elif _has(error_details, "inner: BareRedirect,"):
        failure = Failure(FailureKind.ELSEWHERE, "redirected without an address", 301)
    elif _has(error_details, "(?:source: )?HttpError {"):
        failure = _failure_of_connection(error_details)
    elif isinstance(error, FileNotFoundError):
        failure = Failure(FailureKind.MISSING, "the object does not exist")
    elif isinstance(error, GenericError):
        # obstore raises this error if, for example, it cannot use a file with credentials, or
        # cannot parse the answer.
        failure = Failure(FailureKind.UNUSABLE, setting_error(error))
    else:
        failure = Failure(FailureKind.REFUSED, setting_error(error))
    if _asks_for_credentials(error_details):
        return Failure(FailureKind.NO_CREDENTIALS, failure.reason)
    return failure


def setting_error(error: Exception) -> str:
    """Returns the reason that an exception of obstore gives, as one line.

    This is for exceptions that contain no answer of a store. For example, obstore raises such an
    exception if it cannot use a setting. The reason is the part of the message after the last
    " error: ", without the Rust structure that follows.

    Args:
        error: Exception of obstore.
    """
    return " ".join(str(error).partition(DETAILS)[0].rpartition(" error: ")[2].split())


def _failure_of_answer(http_status: int, body: str) -> Failure:
    """Returns the reason why a request failed, from the answer that the store sent.

    Args:
        http_status: HTTP status of the answer.
        body: Body of the answer; "" if it has none.
    """
    error_code, error_text = _code_and_message(body)
    try:
        status_phrase = http.HTTPStatus(http_status).phrase
    except ValueError:
        status_phrase = "unknown status"
    failure_reason = _as_one_line(error_code, error_text) or f"{http_status} {status_phrase}"
    return Failure(failure_kind_of(http_status, error_code), failure_reason, http_status)


def _code_and_message(body: str) -> tuple[str, str]:
    """Returns the error code and the error message in the body of an error response.

    The body is XML if a store sent the response, and JSON if a server that provides credentials
    sent it.

    Returns:
        A tuple of the error code, such as "NoSuchKey", and the error message. Each of them is "" if
        the body does not contain it.
    """
    with suppress(ValueError):
        error_fields = json.loads(body)
        if isinstance(error_fields, dict):
            return str(error_fields.get("error", "")), str(
                error_fields.get("error_description", "")
            )
    return _xml_field(body, "Code"), _xml_field(body, "Message")


def _xml_field(body: str, tag: str) -> str:
    """Returns the text of the first XML element `tag` in a body; "" if it has no such element."""
    element_match = re.search(f"<{tag}>([^<]*)</", body)
    return unescape(element_match[1]) if element_match else ""


def _as_one_line(error_code: str, error_text: str) -> str:
    """Returns the error code and the message of an answer as one line, "CODE: MESSAGE".

    Only the first line of the message is used, because Azure adds lines with an id and the time.
    """
    first_line = next(iter(error_text.strip().splitlines()), "")
    one_line_texts = [" ".join(answer_text.split()) for answer_text in (error_code, first_line)]
    return ": ".join(filter(None, one_line_texts))


def _failure_of_connection(details: str) -> Failure:
    """Returns the `Failure` of a request that got no answer or an incomplete answer.

    Args:
        details: Text of the Rust structure with which obstore describes its error.
    """
    certificate_match = re.search(r"^ *error: InvalidCertificate\(\n *(\w+)", details, re.MULTILINE)
    if certificate_match:
        failure_reason = f"the certificate of the server is not valid ({certificate_match[1]})"
        return Failure(FailureKind.UNREACHABLE, failure_reason)
    if _has(details, r"error: InvalidMessage\("):
        return Failure(
            FailureKind.UNREACHABLE, "the server at this https:// address does not speak TLS"
        )
    if _has(details, "kind: Builder,"):
        return Failure(FailureKind.UNREACHABLE, "its address cannot be used")
    if _has(details, r"(?:kind|source): (?:Timeout|TimedOut),"):
        return Failure(FailureKind.MAY_PASS, "no answer")
    message_match = re.search(r'^ *(?:message|error): "(.*)",$', details, re.MULTILINE)
    failure_reason = _unescaped(message_match[1]) if message_match else "the connection broke"
    if _has(details, '"dns error",') and "Temporary failure" not in failure_reason:
        return Failure(FailureKind.UNREACHABLE, failure_reason)
    return Failure(FailureKind.MAY_PASS, failure_reason)


def _asks_for_credentials(details: str) -> bool:
    """Returns whether the failed request was sent to a server that provides credentials.

    obstore sends such a request before it sends a request for an object to the store.

    Args:
        details: Failure that obstore printed as a Rust structure.
    """
    if _has(details, "source: TokenRequest {"):
        return True
    # obstore hides addresses that contain secrets (`uri: None`). In requests to S3, only the
    # address of Amazon's token service contains secrets. In requests to Azure, the address of an
    # object may contain a SAS token, so a hidden address does not show that credentials were
    # requested.
    if _has(details, 'store: "S3",') and _has(details, "uri: None,"):
        return True
    address_match = re.search(r"^ *uri: Some\(\n *(\S+),$", details, re.MULTILINE)
    if address_match is None:
        return False
    requested_server = urlsplit(address_match[1]).netloc
    credential_servers = {
        urlsplit(os.environ.get(environment_variable_name, "")).netloc
        for environment_variable_name in CREDENTIAL_ADDRESSES
    }
    return requested_server.startswith("169.254.") or requested_server in credential_servers


def _has(details: str, pattern: str) -> bool:
    """Returns whether any line of an error's details begins with a pattern.

    Args:
        details: Details of an error of obstore, which prints them as a structure of Rust with one
            field on each line.
        pattern: Regular expression for the beginning of the line, after its indentation.
    """
    return re.search(f"^ *{pattern}", details, re.MULTILINE) is not None


def _unescaped(text: str) -> str:
    r"""Replaces the escape sequences in a string that Rust has printed, such as \n and \u{7f}."""
    control_character_by_letter = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}

    def character_of(escape: re.Match[str]) -> str:
        hex_digits, escaped_letter = escape.groups()
        if hex_digits:
            return chr(int(hex_digits, 16))
        return control_character_by_letter.get(escaped_letter, escaped_letter)

    return re.sub(r"\\(?:u{([0-9a-f]+)}|(.))", character_of, text)
