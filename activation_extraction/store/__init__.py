"""What a run writes: shards, commits, metadata and uploads, so that it can continue after a kill.

Callers use storage.py. It asks resume.py what is stored already; folder_lock.py keeps other
processes out of a local folder, and ownership.py out of one in a bucket. shard_cutter.py decides
where shards end; shard_writer.py has formats.py write them and folder.py upload them, which
compares checksums. commit.py and metadata.py describe the JSON files. A folder is local or in a
bucket; both follow the same protocol. Imports no JAX.
"""
