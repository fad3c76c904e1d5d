"""The text around a token: decoded where the model's tokenizer is at hand, else the token's id."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction.inspect.report_sample import TokenSample

AROUND = 12  # tokens that are shown on each side
VISIBLE = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥"})

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Passage:
    """A token in its text. decoded: whether that is text, and not token ids."""

    before: str
    token: str
    after: str
    decoded: bool


def find_tokenizer(metadata: Mapping[str, Any]) -> Decode | None:
    """The function that decodes token ids; None where this machine does not have the tokenizer.

    Looks in the model's folder, and for a model of the hub in the local cache; downloads nothing.
    """
    asked = metadata.get("configuration", {})
    commit = metadata.get("model_commit") or asked.get("model_revision")
    try:
        from tokenizers import Tokenizer

        path = _tokenizer_file(str(asked.get("model_path", "")), commit)
        if path is None:
            return None
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # not installed, or a file that is none: the report shows ids instead
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _tokenizer_file(model_path: str, commit: str | None) -> Path | None:
    local = Path(model_path).expanduser() / "tokenizer.json"
    if local.is_file():
        return local
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_path, "tokenizer.json", revision=commit)
    return Path(found) if isinstance(found, str) else None


def passage(sample: TokenSample, token: int, decode: Decode | None) -> Passage:
    """token: its number in the sample."""
    document = sample.document_of(token)
    start, stop = max(token - AROUND, document.start), min(token + AROUND + 1, document.stop)
    neighbours = np.diff(sample.position[start:stop]) == 1  # elsewhere, tokens were not kept
    gaps = start + 1 + np.flatnonzero(~neighbours)
    start = max([start, *gaps[gaps <= token].tolist()])
    stop = min([stop, *gaps[gaps > token].tolist()])
    show = decode or _ids
    before, own, after = (
        show(sample.token_ids[slice(*span)].tolist()).translate(VISIBLE)
        for span in ((start, token), (token, token + 1), (token + 1, stop))
    )
    before = ("… " if sample.position[start] > 0 else "") + before
    after = after + (" …" if stop < document.stop else "")
    return Passage(before, own, after, decode is not None)


def _ids(ids: list[int]) -> str:
    return " ".join(map(str, ids))
