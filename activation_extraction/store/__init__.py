"""Stores activations so that every sample is there exactly once, whatever process is killed.

This package is a library of its own, which the extraction uses. It knows no model and imports no
JAX; of the command line it knows only the options about text and storage (cli/flags.py). A sample
passes these modules on its way to a committed shard:

    storage.py              ActivationStorage: takes batches or samples, opens and ends a run
      caller_arrays.py      copies and checks the arrays of programs with a loop of their own
      identity.py           declares what decides the content of a run's shards
      resume.py             plans what to store, from the log of what is stored already
      repair.py             plans the same where shards are damaged or missing
    shard_writer.py         gathers samples into shards
      hook_values.py        knows the kinds of values at hooks: how they are stored and read
      shard.py              declares a shard in memory, and lets threads encode and measure it
      formats.py            packs a shard in the format that the run has
      pickle_file.py        the pickle format
      safetensors_file.py   the safetensors format
      statistics.py         sums up the activations, for the file of sums and for the hooks
      sample_table.py       makes and reads the table of samples
    shard_queue.py          stores shards in the background, in order, within the limit of memory
      source_check.py       looks for changes of the files that samples come from
    log_writer.py           writes files and commits, as the only process that may
      run_log.py            reads the log: which shards exist, and why nothing is stored twice
      totals.py             adds up the commits
      metrics.py            writes metrics.jsonl, on which nothing depends

These read it back:

    run_folders.py          finds the folders of a run, and forms their names
    shard_reader.py         reads shards
    shard_check.py          checks shards
    chosen_samples.py       reads single samples, to compute or read them again
    statistics_in_words.py  writes statistics as sentences for people

These access a folder, local, in a bucket or at another URL:

    folder.py               lists, reads, writes and deletes files, and tries again
    local_files.py          a folder on this machine
    bucket.py               a folder in a bucket
    bucket_kinds.py         the kinds of buckets, and how each is reached
    sending.py              waits for writes to a bucket
    answers.py              tells what a failed request means

The format (5) is the same in a local folder and in a bucket:

    machine_000/                      or machine_000_host_00/ of several; a host alone has none
      metadata.json                   the run: its id (`run`), `owner`, `status`, `identity` (what
                                      may not change), totals, hooks, data files
      metrics.jsonl                   speed over time; nothing depends on it
      shard_0001.pkl.gz               activations; or shard_0001.pkl, or shard_0001.safetensors
      shard_0001.samples.parquet      the table of samples, a row for each (sample_table.py)
      shard_0001.npz                  sums for the statistics of every dimension (statistics.py)
      shard_0001.json                 commits the shard, after its other files

A line of metrics.jsonl counts `samples`, `tokens` (those that are kept), `shards_stored` and
`bytes_stored` of the whole run in this folder; the last samples may not be stored yet. Speeds
(`..._per_second`, `..._per_chip`, `model_flops_utilisation`) are those since the line before.
`batches_ready`, `bytes_waiting` and `shards_...` of each phase describe the moment. All other
counts are those of one process, from its start, and have names that end in `since_start`.

Shards are numbered from 1 without gaps. Only those count whose JSON names the `run` of
metadata.json; a JSON with `reserved` counts as none. A committed shard never changes. Its JSON:

  number, run, owner, url           the shard, the run, the process, the folder it was written to
  file, files                       the file of activations; bytes, sha256 and version of each file,
                                    of the activations also crc32c: 8 hexadecimal digits per MiB
  unpacked                          size of the activations' file before gzip
  samples                           `first` and `last`, the smallest and largest sample_idx; count
  tokens, cut_samples, cut_tokens   stored tokens; samples that were cut at their end, by how much
  empty_samples                     samples that keep no token
  hooks                             key (what pickles call it), name, width, dtype (as stored),
                                    scale (null, or how many values share one), statistics
  mark                              where in the data a run continues after the shard: all samples
                                    before it are stored; of those after it, the tables say which;
                                    null at the beginning; its fields are those of text/mark.py
  identity                          the SHA-256 of the run's identity, which a repair compares if
                                    metadata.json is lost
  began, committed                  when its process began, and when it was committed; Unix times

The other files of a shard contain the id of the process that wrote them, `owner`, where readers
ignore it: `writer` in the metadata of safetensors and of the Arrow schema of Parquet, an array
`writer` in the .npz, the comment in the first header of a gzip file, and in a shard_0001.pkl a
string before the dict, which unpickling drops.

Every JSON carries a `checksum`: the SHA-256 of its content without the checksum, as Python's
json.dumps writes it with sort_keys=True and ensure_ascii=False.

Samples are in ascending order within a shard; the numbers of several shards may interleave. A
safetensors shard concatenates its samples: `sample_idx` and `sample_offsets` (int64; sample i has
the tokens from offset i to offset i + 1), `token_ids` and `position` (int32), and one tensor
(tokens, width) per hook under its full name, each one contiguous range of bytes. A pickle is a dict
from key to a list of records, one per sample (pickle_file.py). Conversations have a `role`, the
index in template, system, user, assistant, thinking, tool, and a `turn`, from 0, for every token.

If long documents are split, a sample is a piece of one; its row has `piece` and `start`, so that a
stored token has the position `start` + its own in the document, and every token is stored once.

The identity's `integer_hooks` are int32 and have no statistics; its `float32_hooks` are float32.
One of these is `loss`: NaN says there that the first token of a sample has no value. No other value
is NaN or infinite. If `activation_dtype` is float8, which only safetensors hold, all other hooks
are stored as e4m3 with a float32 scale for every token, (tokens, 1), the tensor HOOK.scale. What is
read is their product; `error` in the JSON says how far off it is.

The identity's `code_hooks`, HOOK.codes, hold the active features of an autoencoder at HOOK, of each
token at most as many as `encode_most` says (the largest), in CSR form. A safetensors shard has five
tensors for them: HOOK.codes.ids (int32) and .values (float32 or bfloat16), of all tokens one after
the other; .offsets (int64, tokens + 1), where those of each token begin; .error and .norm (float32,
tokens), the squared norm of what these features do not reconstruct, and the norm of what is
reconstructed. A record of a pickle has these five for its sample, in the place of `activation`.
`codes` in the JSON has their sums, of the first tokens of samples (`sinks`) and of all others.

Readers ignore tensors, fields and columns they do not know. Other changes get a new format_version.
"""
