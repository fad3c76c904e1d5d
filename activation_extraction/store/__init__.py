"""Stores activations so that every sample is there once, whatever dies meanwhile.

A library of its own, of which the extraction is a client: it knows no model, and imports no JAX.
Begin with storage.py. What is stored has the form below, in a local folder and in a bucket alike;
`format_version` in all JSONs is 4.

    machine_000/                    or machine_000_host_00/ if a machine has several hosts; a single
                                    machine with one host writes to its output folder itself
      metadata.json                 the run: `status` (running, interrupted, failed or complete),
                                    `identity` (what may not change), totals, hooks, data files
      metrics.jsonl                 speed over time; nothing depends on it
      shard_0001.pkl.gz             activations; or shard_0001.pkl, or shard_0001.safetensors
      shard_0001.samples.jsonl.gz   the table of samples
      shard_0001.npz                sums for the statistics of every dimension (statistics.py)
      shard_0001.json               commits the shard

Shards are numbered from 1, without gaps, in at least four digits. A shard without its JSON does not
exist. The JSON is written last, and after that of the shard before it, so what is stored is always
a prefix of the host's samples. Only the last shard may be `partial`: a run that continues makes it
again, and replaces its files.

The JSON of a shard:
  file, bytes, sha256, unpacked     of the activations; unpacked is their size before gzip
  table, statistics                 sha256 of the two smaller files
  samples                           {first, last, count}: ascending `sample_idx`
  tokens, cut_samples, cut_tokens   how many are stored; how many were cut, and what was left out
  hooks                             for each: key (what pickles call it), name, width, dtype (of
                                    NumPy, or bfloat16), scale (null; a reader refuses all else) and
                                    statistics. Hooks may differ in dtype: numbers of experts, the
                                    `integer_hooks` of the run's identity, are int32, and their
                                    statistics are over 0 tokens
  cursor                            where in the data the next shard begins; null: at the start
  run                               digest of the run's identity, the same in all shards
  partial, began, committed         see above; two Unix times in seconds
All JSONs carry a `checksum`: the SHA-256 of their content without it, as Python's json.dumps writes
it with sort_keys and without ensure_ascii.

The table of samples has a line of JSON per sample, in the order of the shard:
  sample_idx, tokens                its number in the whole run; how many of its tokens are stored
  doc_id, text_preview              the `id` of its row; the first 200 characters
  row                               which row it comes from, such as {"file": "a.jsonl", "line": 7}
  cut                               how many tokens were left out at the end of its document

A safetensors shard has the samples one after the other: `sample_idx` and `sample_offsets` (int64;
sample i has the tokens from offset i to offset i + 1), one value per token under a name of its own
(`token_ids`, `position`: int32), and one tensor (tokens, width) per hook under its full name. Every
tensor is one range of bytes. A pickle is a dict from key to a list of records, one per sample
(pickle_file.py); gzip members follow each other, so it has to be read to its end.

Readers ignore values per token, and fields of a record or of the table, that they do not know:
later versions may add some. All other changes get another `format_version`. In a bucket, a JSON
with `claimed_by` only holds a place for a moment, and is no commit.
"""
