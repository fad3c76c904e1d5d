"""What the benchmarks run on, made on the spot and the same every time: a checkpoint of random
weights, documents of FineWeb-Edu's lengths, and their token ids for those who do not tokenise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from activation_extraction.run import demo
from qwen2_jax_with_hooks import FAMILIES

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
    demo.write_weights(folder / "model.safetensors", table.values())
    return sum(int(np.prod(spec.shape)) for spec in table.values())


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
