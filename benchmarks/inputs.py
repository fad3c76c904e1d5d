"""What the benchmarks run on, made on the spot and the same every time: a checkpoint of random
weights, documents of FineWeb-Edu's lengths, and their token ids for those who do not tokenise."""

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from activation_extraction.model.weights import WeightSpec
from activation_extraction.run import demo
from qwen2_jax_with_hooks import FAMILIES

REPEATED = 2**22  # numbers
MEDIAN_TOKENS, SPREAD, LONGEST = 620, 1.0, 2048  # of the documents' log-normal lengths


def make_model(folder: Path, config: dict[str, Any]) -> int:
    """Writes a checkpoint of random bfloat16 weights; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    demo.write_tokenizer(folder, [])
    family, read = FAMILIES.parse_config(config)
    table = family.weight_table(family.whole(read))
    if config["tie_word_embeddings"]:
        del table["lm_head", "weight"]
    write_weights(folder / "model.safetensors", table.values())
    return sum(int(np.prod(spec.shape)) for spec in table.values())


def write_weights(path: Path, table: Iterable[WeightSpec]) -> None:
    """Writes random bfloat16 weights, norms near 1, matrices scaled by their fan-in, to a
    safetensors file. Large matrices repeat themselves: normal numbers take longer than the disk."""
    normal = np.random.default_rng(0).standard_normal(REPEATED, np.float32)
    specs = {name: spec for spec in table for name in spec.hf_names}
    header, end = {}, 0
    for name, spec in specs.items():
        begin, end = end, end + 2 * math.prod(spec.hf_shape)
        header[name] = {"dtype": "BF16", "shape": spec.hf_shape, "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(described)) + described)
        for name, spec in specs.items():
            values = normal / np.float32(math.sqrt(spec.hf_shape[-1])) + name.endswith(
                "norm.weight"
            )
            values, count = values.astype(ml_dtypes.bfloat16), math.prod(spec.hf_shape)
            for begin in range(0, count, REPEATED):
                file.write(values[: count - begin].tobytes())


def make_documents(path: Path, count: int) -> None:
    """Documents with FineWeb-Edu's lengths; without merges, one byte is one token."""
    chance = np.random.default_rng(0)
    lengths = chance.lognormal(np.log(MEDIAN_TOKENS), SPREAD, count)
    lengths = np.clip(lengths.round().astype(int), 1, LONGEST)
    letters = np.frombuffer(b"etaoinshrdlu ", np.uint8)
    rows = [{"text": chance.choice(letters, n).tobytes().decode()} for n in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenise(model: Path, documents: Path, longest: int) -> list[list[int]]:
    """Token ids of every document, cut to `longest`, as the tool makes them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids[:longest] for encoding in encoded]
