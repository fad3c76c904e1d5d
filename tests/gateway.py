"""Serves S3 as Hugging Face documents the gateway to its buckets.

Its address has a path (the namespace), and the name of the bucket follows the path, never precedes
the host. The region is us-east-1. PutObject obeys If-Match and If-None-Match. GetObject ignores
both: it answers 302, and the content comes from another host, which refuses credentials. Listing
works only by ListObjectsV2 with the delimiter `/`. Requests with metadata of objects or trailing
checksums are refused.
"""

import re
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import quote

from gcs_server import Answer, Bucket, Handler

NAMESPACE = "somebody"
REGION = "us-east-1"


class Gateway(Bucket):
    """The gateway and its bucket.

    Attributes:
        key: The query parameter that stands for the signature of a presigned URL.
        redirected: The number of answers with status 302.
        fetched: The number of requests to the other host with the right key.
        tag: The ETag in all answers of the other host. Empty for the right ETags.
        content: The other host.
    """

    def __init__(self) -> None:
        super().__init__(_GatewayHandler)
        self.key = secrets.token_hex(8)
        self.redirected = self.fetched = 0
        self.tag = ""
        self.content = _Content(self)

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables that the README names."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}/{NAMESPACE}",
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def close(self) -> None:
        self.content.close()
        super().close()


class _Content(Bucket):
    """The other host, which serves the same objects."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(_ContentHandler)
        self.gateway = gateway
        self.stored = gateway.stored


class _GatewayHandler(Handler):
    def answer(self, bucket: Bucket, place: str, name: str, body: bytes) -> Answer:
        assert isinstance(bucket, Gateway)
        place, _, name = name.partition("/")
        signed = self.headers.get("Authorization", "")
        if f"/{REGION}/s3/" not in signed:
            return self.error(400, f"expected the region {REGION}", "AuthorizationHeaderMalformed")
        for header in self.headers:
            if re.match("(?i)x-amz-(meta-|trailer)", header):
                return self.error(501, f"{header} is not implemented", "NotImplemented")
        if not name and self.command == "GET":
            if (self.query.get("list-type"), self.query.get("delimiter")) != ("2", "/"):
                return self.error(501, "only ListObjectsV2 with delimiter /", "NotImplemented")
        if name and self.command == "GET" and place == bucket.name and name in bucket.stored:
            with bucket.lock:
                bucket.redirected += 1
            address = f"http://localhost:{bucket.content.port}/{place}/{quote(name)}"
            return 302, {"Location": f"{address}?key={bucket.key}"}, b""
        return super().answer(bucket, place, name, body)


class _ContentHandler(Handler):
    def answer(self, bucket: Bucket, place: str, name: str, body: bytes) -> Answer:
        assert isinstance(bucket, _Content)
        if "Authorization" in self.headers:
            return self.error(400, "only one way to authenticate is allowed", "InvalidArgument")
        if self.command != "GET" or self.query.get("key") != bucket.gateway.key:
            return self.error(403, "denied", "AccessDenied")
        del self.headers["If-Match"]
        with bucket.lock:
            bucket.gateway.fetched += 1
        status, headers, content = super().answer(bucket, place, name, body)
        if bucket.gateway.tag:
            headers = headers | {"ETag": bucket.gateway.tag}
        return status, headers, content


@contextmanager
def gateway() -> Iterator[Gateway]:
    """Runs a gateway with one empty bucket."""
    with closing(Gateway()) as bucket:
        yield bucket
