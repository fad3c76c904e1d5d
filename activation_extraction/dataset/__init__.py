"""Reads back the activations of a run, whether it is finished or still going on.

dataset.py is ActivationDataset. Its batches (batches.py) are shuffled in an order that depends on
the seed alone; windows.py has them in bounded memory. sample_activations.py is one sample, or a
document that is joined from several. open_shards.py keeps shards open and reads what lies beside
them, and folders.py finds the folders of all machines and hosts. This folder imports no JAX and
never runs pickled code.
"""
