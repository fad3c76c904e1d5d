"""Compares what `--plan here` says with what happens: `python -m benchmarks.planning`.

For every shape, with random weights and documents of log-normal length, it plans a run on this
machine's CPU and then runs it with the same flags, each in a process of its own. It prints tokens
per second: planned ones, at worst and at best, and real ones. The last line is one JSON object,
which also has the bytes of a token.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.inputs import make_documents, make_model
from benchmarks.processes import ROOT, extract, machine, run
from benchmarks.shapes import SHAPES, evenly_spaced

HOOKS = 4
THREE = ("0.1B", "qwen3", "0.5B")


def compare(shape: str, folder: Path, documents: int, length: int) -> dict[str, Any]:
    """Plans a run, runs it, and returns the planned and the real numbers."""
    model, texts = folder / shape, folder / f"{shape}.jsonl"
    make_model(model, SHAPES[shape])
    make_documents(texts, documents)
    layers = evenly_spaced(HOOKS, SHAPES[shape]["num_hidden_layers"])
    flags = ["--model_path", str(model), "--dataset_path", str(texts), "--compilation_cache", "off"]
    flags += ["--max_seq_length", str(length), "--layers_to_extract", *map(str, layers)]
    output = folder / f"{shape}-out"
    script = [sys.executable, str(ROOT / "extract_activations.py"), *flags]
    planned = run([*script, "--plan", "here", "--json", "--output_dir", str(output)]).result
    real = extract(output, flags)
    low, high = planned["best"]["tokens_per_second"]
    metadata = json.loads((output / "metadata.json").read_text())
    stored = sum(hook["width"] for hook in metadata["hooks"]) * 4
    found = {
        "planned": [low, high],
        "real": real["tokens"] / real["extraction_seconds"],
        "planned_bytes_per_token": planned["bytes_per_token"],
        "bytes_per_token": stored,
        "disturbed": real["disturbed"],
    }
    found["over_middle"] = found["real"] / ((low + high) / 2)
    print(
        f"{shape:8} planned {low:,.0f} to {high:,.0f} tokens/s, real {found['real']:,.0f}, "
        f"{found['over_middle']:.2f} times the middle; other processes used "
        f"{found['disturbed']:.0%}",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=THREE)
    parser.add_argument("--documents", type=int, default=40, help="(default: 40)")
    parser.add_argument("--max_seq_length", type=int, default=1024, help="(default: 1024)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = {
            shape: compare(shape, Path(name), given.documents, given.max_seq_length)
            for shape in given.shapes
        }
    print(json.dumps({"machine": machine(), "shapes": found}))


if __name__ == "__main__":
    main()
