"""Stores activations so that every sample is there exactly once, whatever process is killed.

This is a library of its own, which the extraction uses: it knows no model and imports no JAX. Begin
with storage.py. The format, which is the same in a local folder and in a bucket, is described
below; `format_version` in all JSONs is 4.

    machine_000/                    or machine_000_host_00/ if a machine has several hosts; a single
                                    machine with one host writes straight to its output folder
      metadata.json                 the run: `status` (running, interrupted, failed or complete),
                                    `identity` (what may not change), totals, hooks, data files
      metrics.jsonl                 speed over time; nothing depends on it
      shard_0001.pkl.gz             activations; or shard_0001.pkl, or shard_0001.safetensors
      shard_0001.samples.jsonl.gz   the table of samples
      shard_0001.npz                sums for the statistics of every dimension (statistics.py)
      shard_0001.json               commits the shard

Shards are numbered from 1, without gaps, in at least four digits. A shard without its JSON does not
exist. A shard's JSON is written after its other files and after the JSON of the previous shard, so
what is stored is always a prefix of the host's samples. Only the last shard may be `partial`: a run
that continues computes it again and replaces its files.

The JSON of a shard:
  file, bytes, sha256, unpacked     the file of activations; unpacked is its size before gzip
  table, statistics                 sha256 of the two smaller files
  samples                           {first, last, count} of the ascending `sample_idx`
  tokens, cut_samples, cut_tokens   how many tokens are stored; how many samples were cut at their
                                    end, and how many tokens that left out
  empty_samples                     how many samples keep no token
  hooks                             for each: key (what pickles call it), name, width, dtype (of
                                    what is stored: a NumPy dtype, bfloat16 or float8_e4m3fn),
                                    scale (null, or how many values share a scale), and the
                                    statistics tokens, values, mean, variance, mean_norm, max_norm.
                                    An encoded hook also has the `error` of its encoding
  cursor                            where in the data a run continues after the shard (see below);
                                    null: at the start
  run                               digest of the run's identity, the same in all shards
  partial                           whether the shard was cut before it was full
  began, committed                  when its process began to store, and when it was committed;
                                    Unix times in seconds
Every JSON carries a `checksum`: the SHA-256 of its content without the checksum, as Python's
json.dumps writes it with sort_keys=True and ensure_ascii=False.

A cursor is where the earliest batch begins that has a sample which is not stored yet. `samples`
says how many samples of the host come before that, and `tokens` how many tokens these keep;
`stream` and `skip` say where the data continues; `skipped_rows` and `empty_rows` count the rows
before it that could not be used, or have no text. A batch may hold samples ahead of those that it
leaves to later batches. `taken` lists the samples after the cursor that are in earlier batches, and
so are stored: their numbers among the host's samples, from 0, ascending, 63 at most. It is absent
if there are none.

The table of samples has a line of JSON per sample, in the order of the shard:
  sample_idx, tokens                its number in the whole run; how many of its tokens are stored
  doc_id, text_preview              the `id` of its row; its first 200 characters
  row                               the row it comes from, such as {"file": "a.jsonl", "line": 7}
  cut                               how many tokens were left out at the end of its document
  columns                           other columns of its row, JSON values by name; only if there are

The row of a sample of a mixture has the `source`, too. Where long documents are split, a sample is
a piece of one. The pieces follow each other on one host, and their rows are equal but for `piece`,
counted from 0, and `start`, the position in the document of the first token of the piece. A stored
token has the position `start` + its own in the document. Every token is stored once: those at the
start of a piece that only repeat the piece before are left out.

A safetensors shard concatenates its samples: `sample_idx` and `sample_offsets` (int64; sample i has
the tokens from offset i to offset i + 1), tensors with one value per token (`token_ids` and
`position`, int32), and one tensor (tokens, width) per hook under its full name. Every tensor is one
contiguous range of bytes. A pickle is a dict from key to a list of records, one per sample
(pickle_file.py); it consists of several gzip members, so it has to be read to its end.

A run of conversations has two more values per token, int32: `role`, the index in template, system,
user, assistant, thinking, tool, and `turn`, the number of the turn from 0. In safetensors they
follow `position`; in pickles they are fields of every record.

Two lists in the run's identity name the hooks whose values are no activations, and are stored as
they are, whatever `activation_dtype` is. `integer_hooks` are int32, numbers of experts or of
tokens; their statistics are over 0 tokens. `float32_hooks` are float32. One of them is `loss`: NaN
says there that the first token of a sample (position 0) has no value, and statistics leave that
token out. No other stored value is NaN or infinite.

In the identity of what another program stores, the model, the data set and `activation_dtype` may
be empty. Its `sample_idx` may have gaps, and its pickles may lack `token_ids` (null).

If the identity's `activation_dtype` is float8, all other hooks are encoded: their dtype is
float8_e4m3fn (F8_E4M3 in safetensors; its bits, uint8, in pickles), and every token has a scale,
float32, so the JSON's `scale` is the width. The value that is read is the stored one times its
scale, in float32, and statistics are over what is read. The scales of HOOK are (tokens, 1). In
safetensors they are the tensor HOOK.scale, which follows the tensor HOOK; in pickles they are the
field `scale` of its records. `error` describes ||x - what is read|| / ||x|| of some tokens x: how
many `tokens` were measured, `mean` and `worst` for `sinks` (position 0), and the same for `others`.

Readers ignore per-token tensors, and fields of a record or of the table, that they do not know:
later versions may add some. Any other change gets a new `format_version`. In a bucket, a JSON that
has `claimed_by` is no commit: a process has only reserved its name.
"""
