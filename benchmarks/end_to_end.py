"""The whole job at a real model's size: `make bench`.

Random weights of the Qwen2.5-0.5B shape, documents of log-normal length (median 620 tokens, sigma
1.0, cut at 2048), the default layers 10..23, gzip-pickle shards on disk. Each run is a process of
its own. The last line printed is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction import demo
from qwen2_jax import Qwen2, QwenConfig, weight_table

ROOT = Path(__file__).parents[1]
SHAPE_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def make_model(folder: Path, config: dict[str, Any]) -> int:
    """Writes a checkpoint of random bfloat16 weights; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    demo.write_tokenizer(folder, [])
    table = weight_table(Qwen2(QwenConfig.from_hf(config)))
    if config["tie_word_embeddings"]:
        del table["lm_head", "weight"]
    demo.write_weights(folder / "model.safetensors", table.values())
    return sum(int(np.prod(spec.shape)) for spec in table.values())


def make_documents(path: Path, count: int) -> None:
    """Documents with FineWeb-Edu's lengths; without merges, one byte is one token."""
    chance = np.random.default_rng(0)
    lengths = np.clip(chance.lognormal(np.log(620), 1.0, count).round().astype(int), 1, 2048)
    letters = np.frombuffer(b"etaoinshrdlu ", np.uint8)
    rows = [{"text": chance.choice(letters, n).tobytes().decode()} for n in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(model: Path, documents: Path, output: Path, *flags: str) -> dict[str, float]:
    """One extraction in a process of its own: metadata totals, seconds and peak memory in bytes."""
    command = [sys.executable, str(ROOT / "extract_activations.py"), "--overwrite", *flags]
    command += ["--model_path", str(model), "--dataset_path", str(documents)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--output_dir", str(output)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    peak = PeakMemory(process.pid)
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")
    print(printed.strip(), file=sys.stderr)
    totals = json.loads((output / "metadata.json").read_text())
    return {
        "samples": totals["samples"],
        "tokens": totals["tokens"],
        "bytes": totals["bytes"],
        "extraction_seconds": totals["seconds"],
        "process_seconds": time.perf_counter() - began,
        "peak_bytes": peak.bytes,
    }


class PeakMemory:
    """Watches the peak resident size of a process, as Linux counts it, until it ends."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._status = Path(f"/proc/{pid}/status")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            try:
                fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
            except OSError:
                return
            if "VmHWM" not in fields:
                return
            self.bytes = int(fields["VmHWM"].split()[0]) * 1024
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=24, help="(default: 24)")
    parser.add_argument("--batch_size", default="8", help="rows per step (default: 8)")
    parser.add_argument("--max_seq_length", default="2048", help="tokens per row (default: 2048)")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_model(folder / "model", SHAPE_05B)
        make_documents(folder / "documents.jsonl", arguments.documents)
        for dtype, size in (("bfloat16", 2), ("float32", 4)):
            flags = ["--dtype", dtype, "--batch_size", arguments.batch_size]
            flags += ["--max_seq_length", arguments.max_seq_length]
            found = run(folder / "model", folder / "documents.jsonl", folder / "out", *flags)
            found["tokens_per_second"] = found["tokens"] / found["extraction_seconds"]
            found["peak_over_weights"] = found["peak_bytes"] / (parameters * size)
            results[dtype] = found
    print(json.dumps(results))


if __name__ == "__main__":
    main()
