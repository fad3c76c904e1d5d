"""Reads back the activations of a run, whether it is finished or still going on.

    dataset.py       ActivationDataset: the samples of a run
    paired.py        several runs over the same data, reduced to the tokens that all runs have
    token_batch.py   tokens with their activations: batches and whole samples
    token_source.py  BatchOptions: arguments of `batches`; TokenSource: filtered tokens of a run
    batches.py       Batches: an iterator over batches, with a state that can be restored
    windows.py       windows of tokens, from which batches are cut, in bounded memory
    grain.py         tokens in any order, for the data loading library grain
    open_shards.py   keeps shards open, and reads their tables of samples and their statistics
    features.py      frequency and strongest tokens of each feature of an autoencoder

This package imports no JAX and never runs pickled code.
"""
