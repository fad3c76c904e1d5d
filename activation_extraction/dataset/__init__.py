"""Reads back the activations of a run, whether it is finished or still going on.

dataset.py is ActivationDataset. Its batches are shuffled in an order that depends on the seed
alone: token_source.py orders the chunks of the shards, windows.py reads them ahead and shuffles the
tokens of a window, batches.py hands them out. sample_list.py lists the samples, and folders.py
finds the folders of all machines and hosts. This folder imports no JAX and never runs pickled code.
"""
