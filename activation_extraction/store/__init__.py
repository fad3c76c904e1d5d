"""Stores activations. Every sample is stored exactly once, whatever process is killed.

This package is a library that the extraction uses. It depends on no model and imports no JAX. Of
the command line, it uses only the options about text and storage (cli/flags.py). A sample passes
these modules on its way to a committed shard:

    storage.py              ActivationStorage: takes batches or samples, opens and ends a run
      caller_arrays.py      copies and checks the arrays of programs with a loop of their own
      identity.py           declares the settings that decide the content of a run's shards
      resume.py             plans how a process continues the stored run
      repair.py             plans the repair of a run with damaged or missing shards
    shard_writer.py         gathers samples into shards, makes their files, and commits them
      stored_hook.py        declares the kinds of values at hooks, and how they are stored and read
      shard.py              declares a shard in memory, encodes its values, computes statistics
      formats.py            converts a shard to a file in the format of the run
      pickle_file.py        writes and reads the pickle format
      safetensors_file.py   writes and reads the safetensors format
      statistics.py         computes sums and statistics of the values at hooks
      sample_table.py       makes and reads the table of samples
    shard_queue.py          stores shards in background threads, in order, and limits the memory
      source_check.py       checks that the files of the data set have not changed
    log_writer.py           writes files and commits, as the only process that may write
      run_log.py            reads the log, which says which shards exist
      totals.py             adds up the numbers in the commits
      metrics.py            writes metrics.jsonl, on which nothing depends

These modules read a stored run:

    run_folders.py          names, finds and compares the folders of a run
    shard_reader.py         reads shards
    shard_check.py          checks shards
    chosen_samples.py       reads single samples, so that they can be computed again
    statistics_lines.py     describes statistics in sentences for people

These modules access a folder, which is local, in a bucket, or at another URL:

    folder.py               lists, reads, writes and deletes files, and repeats failed requests
    local_files.py          accesses a folder on this machine
    bucket.py               accesses a folder in a bucket
    hub_folder.py           reads a folder in a repository of the Hugging Face hub
    bucket_kinds.py         declares the kinds of buckets, with the settings to connect to each
    sending.py              waits for writes to a bucket
    answers.py              determines why a request failed

The format (5) of the stored files, which is the field `format_version` of every JSON, is the same
in a local folder and in a bucket:

    machine_000/                      machine_000_host_00/ if a machine has several hosts; without
                                      a folder if there is only one machine with one host
      metadata.json                   the run: its id (`run`), `owner`, `status`, `identity`
                                      (settings that must not change), totals, hooks, data files
      metrics.jsonl                   speed over time; nothing depends on it
      shard_0001.pkl.gz               activations; or shard_0001.pkl, or shard_0001.safetensors
      shard_0001.samples.parquet      table of samples, with a row per sample (sample_table.py)
      shard_0001.npz                  sums for the statistics of every dimension (statistics.py)
      shard_0001.json                 commit of the shard, written after its other files

A line of metrics.jsonl contains the numbers of `samples`, of stored `tokens`, of `shards_stored`
and of `bytes_stored` of the whole run in this folder. The last samples may not be stored yet. Names
that end in `..._per_second` or `..._per_chip`, and `model_flops_utilisation`, are speeds since the
line before. `batches_ready`, `bytes_waiting` and the numbers of shards in each phase
(`shards_packing` and so on) are the values at the time at which the line was written. All other
numbers are counts of one process since its start, and have names that end in `since_start`.

Shards are numbered from 1 without gaps. A shard exists if its JSON names the same `run` as
metadata.json and has no field `reserved`. A committed shard never changes. Its JSON contains:

  number, run, owner, url           number of the shard, ids of the run and of the process that
                                    wrote it, and URL of the folder to which it was written
  file, files                       name of the file of activations; bytes, sha256 and version of
                                    each file; crc32c of the file of activations, 8 hexadecimal
                                    digits per MiB; for safetensors, `ranges`: checksums of ranges
                                    of the file, described below, which older shards lack
  unpacked                          bytes of the file of activations before compression
  samples                           `first` and `last`, the smallest and largest sample_idx; `count`
  tokens                            number of stored tokens
  cut_samples, cut_tokens           number of samples that were cut at their end; number of tokens
                                    that were cut off
  empty_samples                     number of samples without a stored token
  hooks                             of each hook: key (its name in pickles), name, width, dtype in
                                    the file, scale (null, or number of values that share a scale),
                                    statistics
  mark                              place in the data from which the run continues after the shard,
                                    with the fields of text/mark.py; all samples before the mark
                                    are stored; the tables of samples list the stored samples after
                                    the mark; null for the beginning of the data
  identity                          SHA-256 of the run's identity, which a repair compares if
                                    metadata.json is lost
  began, committed                  Unix times at which the process began and the shard was
                                    committed

The other files of a shard contain the id of the process that wrote them (`owner`) at a place that
readers ignore: `writer` in the metadata of safetensors and of the Arrow schema of Parquet, an array
`writer` in the .npz file, the comment in the first header of a gzip file, and in a shard_0001.pkl a
string before the dict, which unpickling discards.

Every JSON contains a `checksum`: the SHA-256 of its content without the checksum, as Python's
json.dumps writes it with sort_keys=True and ensure_ascii=False.

Samples are in ascending order within a shard, but a later shard may contain samples with smaller
numbers. A safetensors shard concatenates its samples. It contains `sample_idx` and `sample_offsets`
(int64; sample i has the tokens from offset i to offset i + 1), `token_ids` and `position` (int32),
and for each hook one tensor (tokens, width) under the hook's full name. Each tensor is one
contiguous range of bytes. `ranges` in the JSON divides the tokens into blocks of `tokens` tokens.
Its `crc32c` contains checksums of each tensor that has one row per token: 8 hexadecimal digits for
the rows of each block. `front` is the number of bytes of the file before `token_ids`, and
`front_crc32c` is the checksum of these bytes. If `consecutive` is true, the positions of every
sample are 0, 1, 2 and so on.

A pickle is a dict from the key of each hook to a list of records, one per sample (pickle_file.py).
In conversations, every token has a `role`, an index from 0 into the list template, system, user,
assistant, thinking, tool, and a `turn`, counted from 0.

If long documents are split, a sample is a piece of a document. Its row contains `piece` and
`start`, so that the position of a token in the document is `start` plus its position in the sample,
and every token is stored once.

The values at the `integer_hooks` of the identity are int32 and have no statistics. The values at
its `float32_hooks` are float32. One of these hooks is `loss`. It is NaN at the first token of a
sample, because this token has no loss. No other value is NaN or infinite. If `activation_dtype` is
float8, which only safetensors can contain, all other hooks are stored as e4m3, with a float32 scale
for every token in the tensor HOOK.scale, (tokens, 1). Readers return the product of value and
scale. `error` in the JSON contains relative errors of this encoding.

The `code_hooks` of the identity, named HOOK.codes, contain the active features of an autoencoder at
HOOK in CSR form. Of each token, only the largest features are stored, at most as many as
`encode_most` of the identity. A safetensors shard contains five tensors for such a hook:

  HOOK.codes.ids      features of all tokens, int32, one token after the other
  HOOK.codes.values   values of these features, float32 or bfloat16
  HOOK.codes.offsets  index in these two tensors of the first feature of each token, and the number
                      of all features, int64 (tokens + 1,)
  HOOK.codes.error    squared norm of the difference between each token's target activation and its
                      reconstruction from the stored features, float32 (tokens,)
  HOOK.codes.norm     norm of each token's target activation, float32 (tokens,)

The target activation is the original activation that the autoencoder reconstructs. It is the
activation at HOOK, except that a transcoder reconstructs the activation at another hook, which
`reconstructs` in metadata.json names.

A record of a pickle contains these five arrays for its sample instead of `activation`. `codes` in
the JSON contains sums over the codes of the first tokens of samples (`sinks`) and of all other
tokens (`others`).

Readers ignore tensors, fields and columns with unknown names. All other changes of the stored files
need a new `format_version`.
"""
