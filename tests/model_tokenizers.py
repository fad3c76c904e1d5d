"""Changes the tokenizer in a model's folder to other kinds that checkpoints have."""

import json

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

# Llama 3 splits text like this before byte-level BPE (the pattern is in its tokenizer.json).
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BEGIN_OF_TEXT = "<|begin_of_text|>"


def with_settings(model, settings, files=()):
    """Changes the settings of a model's tokenizer, and adds JSON files.

    Args:
        model: The folder of the model, which is also returned.
        settings: Fields of tokenizer_config.json.
        files: The content of each new file by name.
    """
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    for name, content in dict(files).items():
        (model / name).write_text(json.dumps(content))
    return model


def as_two_files(model):
    """Turns a model's tokenizer.json into the vocab.json and merges.txt of older checkpoints."""
    whole = json.loads((model / "tokenizer.json").read_text())
    added = {str(token.pop("id")): token for token in whole["added_tokens"]}
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    (model / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    (model / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (model / "tokenizer.json").unlink()
    return with_settings(model, {"added_tokens_decoder": added})


def as_llama_3(model):
    """Gives a model's tokenizer Llama 3's rules for words, and its token at the start of a text."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(LLAMA_3_WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.normalizer = None
    tokenizer.add_special_tokens([BEGIN_OF_TEXT])
    begin = processors.TemplateProcessing(
        single=f"{BEGIN_OF_TEXT} $A",
        special_tokens=[(BEGIN_OF_TEXT, tokenizer.token_to_id(BEGIN_OF_TEXT))],
    )
    to_bytes = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([to_bytes, begin])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN_OF_TEXT}
    return with_settings(model, settings)


def as_llama_2(model, texts):
    """Gives a model a tokenizer like Llama 2's.

    It puts a prefix before each text, does not split it into words, so that a token may be several
    words, and has a token for each byte. It is trained on `texts`.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    to_marks = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), to_marks])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(model / "tokenizer.json"))
    state = json.loads((model / "tokenizer.json").read_text())
    # Bytes are part of the model's vocabulary, not added tokens.
    state["added_tokens"] = state["added_tokens"][:3]
    (model / "tokenizer.json").write_text(json.dumps(state))
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    return with_settings(model, settings | {"unk_token": "<unk>", "pad_token": None})
