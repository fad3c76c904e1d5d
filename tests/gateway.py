"""An S3 gateway as Hugging Face documents the one in front of its buckets.

Its address has a path (the namespace) and bucket names come after it, never before the host. The
region is us-east-1. PutObject obeys If-Match and If-None-Match. GetObject ignores both: it answers
302, and the content comes from another host, which wants no credentials. ListObjectsV2 is the only
listing, with the delimiter `/` only. Metadata of objects and trailing checksums are refused.
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
    """The bucket behind the gateway. `redirected` counts the answers 302, and `fetched` the answers
    of the other host. `tag`, if it is set, is the ETag in all of these."""

    def __init__(self) -> None:
        super().__init__(_GatewayHandler)
        self.key = secrets.token_hex(8)  # stands for the signature of a presigned URL
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
    """The other host, which has the same objects."""

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
        return (
            status,
            headers | ({"ETag": bucket.gateway.tag} if bucket.gateway.tag else {}),
            content,
        )


@contextmanager
def gateway() -> Iterator[Gateway]:
    """A running gateway with one empty bucket."""
    with closing(Gateway()) as bucket:
        yield bucket
