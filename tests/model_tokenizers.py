"""Changes the tokenizer in a model's folder."""

import json


def with_settings(model, settings, files=()):
    """Changes what stands beside a model's vocabulary: settings, and files by name."""
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
