"""The end of --help: examples, files, environment variables, the prompt for ARC-AGI rows."""

from activation_extraction.cli.defaults import ENVIRONMENT, ONLY_MULTIHOST


def epilog() -> str:
    """The end of --help."""
    filled = "\n".join(
        f"  {' or '.join(names):<46} --{flag}{' (with --multihost)' * (flag in ONLY_MULTIHOST)}"
        for flag, names in ENVIRONMENT.items()
    )
    return BEFORE_ENVIRONMENT + filled + AFTER_ENVIRONMENT


BEFORE_ENVIRONMENT = """\
examples:
  extract_activations.py --demo
      a tiny model and sample documents, made on the spot; needs no network
  extract_activations.py --model_path Qwen/Qwen2.5-0.5B --layers_to_extract 12 --max_samples 1000
      1000 documents of FineWeb-Edu through a model from the hub
  extract_activations.py --model_path ./my-qwen --dataset_path texts.jsonl.gz --output_dir out
      your own model and texts
  extract_activations.py --model_path ./my-qwen --upload_to_gcs --gcs_bucket B --gcs_prefix run1
      shards go to gs://B/run1/machine_000; if the run is killed, the same command continues it
  extract_activations.py --status --output_dir gs://B/run1
      how far the run has come

what is written, to --output_dir or to gs://BUCKET/PREFIX/machine_000:
  shard_0001.pkl.gz  a gzipped pickle: {layer or hook name: [record, ...]}, one record per sample,
                     with sample_idx, hook, activation (tokens, width), shape, text_preview,
                     token_ids and doc_id; or shard_0001.safetensors (--shard_format)
  shard_0001.json    its checksum, samples and statistics, and where in the data to continue
  shard_0001.npz     sums for the statistics of every dimension
  shard_0001.samples.jsonl.gz  its samples: doc_id, row of the data set, what was cut off, preview
  metadata.json      the status, totals, configuration, model and versions of the run
  metrics.jsonl      speed and queues over time
  Each of several machines or hosts has its own folder: machine_000, machine_000_host_00, ...

read it:
  from activation_extraction import ActivationDataset
  sample = ActivationDataset("out")[7]  # its activations by hook, token_ids, text_preview, ...
or one shard, without this program:
  import gzip, pickle
  records = pickle.loads(gzip.open("out/shard_0001.pkl.gz").read())  # {layer: [record, ...]}

environment variables that stand in for flags that are not given:
"""
AFTER_ENVIRONMENT = """
  HF_TOKEN gives access to private and gated repositories of the Hugging Face hub.

rows with ARC-AGI's columns train and test, and no text column, become this prompt; the outputs of
the tests are left for the model to find:
  Example 1
  Input:
  0 1
  Output:
  1 0

  Test 1
  Input:
  1 1
  Output:

exit status: 0 done; 1 failed on the way, or --verify found a problem; 2 bad input; 130 or 143
stopped by Ctrl-C or SIGTERM (complete samples are stored). A scheduler should never retry 2.
"""
