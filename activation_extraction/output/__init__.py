"""What a run writes: shards, their commits, metadata, uploads, and continuing after a kill.

Imports no JAX. A folder is local or in a bucket; both are written by the same protocol.
"""
