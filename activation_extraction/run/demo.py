"""The demo's inputs are a small Qwen2 checkpoint and sample documents, made on the spot.

The files look like real ones (config.json, safetensors, tokenizer.json; Parquet) and have the same
bytes every time. The weights are random: the demo shows that the pipeline works, not what a trained
model has learned.
"""

import errno
import json
import math
import random
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow
import pyarrow.parquet
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from activation_extraction.common.errors import InputError, reason_of
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.weight_files import SINGLE_FILE
from activation_extraction.model.weights import WeightSpec
from activation_extraction.store.local_files import IS_A_LINK, FolderError, write_file
from qwen2_jax import Qwen2, weight_table

VOCAB_SIZE = 2048
HOW_MANY = 300  # documents
MEDIAN_SENTENCES, SPREAD = 6, 0.8  # the documents' lengths are log-normal
END_OF_TEXT = "<|endoftext|>"
# Qwen2 splits text like this before byte-level BPE (the pattern is in its tokenizer.json).
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
}


def make_demo(output: Path) -> tuple[Path, Path]:
    """Makes the model's folder and the documents in `output`/demo_inputs; returns their paths.

    Raises InputError if they cannot be written there.
    """
    folder = output / "demo_inputs"
    model, documents = folder / "model", folder / "documents.parquet"
    weights = weight_table(Qwen2(parse_model_config(MODEL_CONFIG))).values()
    text = resources.files(__package__).joinpath("demo_texts.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    try:
        for path in (folder, model):
            if path.is_symlink():
                raise OSError(errno.ELOOP, IS_A_LINK)
            path.mkdir(parents=True, exist_ok=True)
        write_documents(documents, paragraphs)
        write_tokenizer(model, paragraphs)
        write_file(model / "config.json", [json.dumps(MODEL_CONFIG, indent=2).encode()])
        write_weights(model / SINGLE_FILE, weights)
    except (OSError, FolderError) as error:
        raise InputError(f"--demo: {folder}: {reason_of(error)}") from error
    return model, documents


def write_documents(path: Path, paragraphs: list[str]) -> None:
    """Writes documents: runs of sentences, of log-normal length."""
    rng = random.Random(0)
    sentences = [s for paragraph in paragraphs for s in re.split(r"(?<=[.!?]) ", paragraph)]
    rows = []
    for number in range(HOW_MANY):
        count = math.ceil(rng.lognormvariate(math.log(MEDIAN_SENTENCES), SPREAD))
        start = rng.randrange(len(sentences))
        text = " ".join(sentences[start : start + count])
        rows.append({"text": text, "id": f"<urn:demo:{number:04d}>", "score": rng.uniform(3, 5)})
    written = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), written, row_group_size=100)
    write_file(path, [written.getvalue().to_pybytes()])


def write_tokenizer(folder: Path, paragraphs: list[str]) -> None:
    """Writes a byte-level BPE that splits words as Qwen2's does, trained on the sample text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    write_file(folder / "tokenizer.json", [tokenizer.to_str(pretty=True).encode()])
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
    }
    write_file(folder / "tokenizer_config.json", [json.dumps(settings, indent=2).encode()])


def write_weights(path: Path, table: Iterable[WeightSpec]) -> None:
    """Writes random bfloat16 weights: norms near 1, matrices scaled by their fan-in."""
    rng = np.random.default_rng(0)
    tensors = {}
    for spec in table:
        for name in spec.hf_names:
            values = rng.standard_normal(spec.hf_shape, np.float32)
            values /= math.sqrt(spec.hf_shape[-1])
            if name.endswith("norm.weight"):
                values += 1
            tensors[name] = values.astype(ml_dtypes.bfloat16)
    write_file(path, [save(tensors, metadata={"format": "pt"})])
