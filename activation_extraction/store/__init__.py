"""Stores activations so that every sample is there once, whatever dies meanwhile.

Callers use storage.py. It asks resume.py what is stored already; folder_lock.py keeps other
processes out of a local folder, and ownership.py out of one in a bucket. shard_cutter.py decides
where shards end; shard_writer.py stores several of them at a time: formats.py says which bytes a
shard has, blocks.py compresses them in many threads, shard_files.py hashes them and adds up
statistics, and atomic_file.py or object_store.py takes them to a folder or a bucket. Then the
shard's JSON commits it, in order; commit.py and metadata.py describe the JSON files. A folder is
local or in a bucket; both follow the same protocol. Imports no JAX.
"""
