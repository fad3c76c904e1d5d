"""Reads back the activations of a run, whether it is finished or still going on.

    dataset.py       ActivationDataset: the samples of a run
    paired.py        several runs read as one, by the tokens that all of them have
    token_batch.py   tokens with their activations: batches and whole samples
    token_source.py  BatchOptions: what a batch can be asked for, and which tokens it takes
    batches.py       batches in an order that depends on the seed alone
    windows.py       takes batches from windows of tokens, in bounded memory
    grain.py         tokens in any order, as records for grain
    open_shards.py   keeps shards open, and reads the small files beside them
    features.py      how often, and where most, the features of autoencoders are active

This room imports no JAX and never runs pickled code.
"""
