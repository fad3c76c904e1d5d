"""Conditional writes: requests that a store carries out only if an object is still as it was seen.

Google Cloud Storage compares generations, S3 compares ETags. Other stores have no such requests, or
their file systems do not offer them. All of them raise FileExistsError or FileNotFoundError when
the object has changed.
"""

from typing import Any, Protocol


class Conditions(Protocol):
    """The conditional requests of one store. Paths are those of its file system."""

    def version(self, entry: dict[str, Any]) -> str:
        """The version of an object, from what a listing or `info` says of it."""
        ...

    def write(self, path: str, data: bytes, version: str | None) -> str:
        """Replaces this version of a small object (None: creates it); returns the new version."""
        ...

    def delete(self, path: str, version: str) -> None:
        """Deletes this version of an object."""
        ...


class GenerationConditions:
    """Google Cloud Storage. Generation 0 stands for an object that does not exist."""

    def __init__(self, file_system: Any) -> None:
        self._fs = file_system

    def version(self, entry: dict[str, Any]) -> str:
        return str(entry["generation"])

    def write(self, path: str, data: bytes, version: str | None) -> str:
        bucket, key, _ = self._fs.split_path(path)
        answer = self._fs.call(
            "POST",
            f"{self._fs._location}/upload/storage/v1/b/{{}}/o",
            bucket,
            uploadType="media",
            name=key,
            ifGenerationMatch=version or "0",
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            json_out=True,
        )
        return str(answer["generation"])

    def delete(self, path: str, version: str) -> None:
        bucket, key, _ = self._fs.split_path(path)
        self._fs.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version)


class TagConditions:
    """S3, whose ETags are digests of what is stored: what is to be told apart must differ."""

    def __init__(self, file_system: Any) -> None:
        self._fs = file_system

    def version(self, entry: dict[str, Any]) -> str:
        return str(entry["ETag"])

    def write(self, path: str, data: bytes, version: str | None) -> str:
        expected = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        return str(self._call("put_object", path, Body=data, **expected)["ETag"])

    def delete(self, path: str, version: str) -> None:
        self._call("delete_object", path, IfMatch=version)

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        bucket, key, _ = self._fs.split_path(path)
        self._fs.invalidate_cache(path)
        try:
            return self._fs.call_s3(method, Bucket=bucket, Key=key, **arguments)
        except OSError as error:  # s3fs has no type of its own for a failed IfMatch
            response = getattr(error.__cause__, "response", {})
            if response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
                raise FileExistsError(path) from error
            raise


def conditions_of(file_system: Any, protocols: tuple[str, ...]) -> Conditions | None:
    """The conditional requests that a file system offers; None when it has none."""
    if not {"gs", "gcs"}.isdisjoint(protocols):
        return GenerationConditions(file_system)
    if "s3" in protocols and hasattr(file_system, "call_s3"):
        return TagConditions(file_system)
    return None
