"""Reads back the activations of a run, whether it is finished or still going on.

dataset.py is ActivationDataset, and paired.py reads several runs as one. batches.py gives their
tokens in an order that depends on the seed alone, and windows.py does so in bounded memory.
token_source.py has the tokens of one run, and alignment.py those that all of several runs have.
grain.py gives the tokens of one run in any order, as records for grain.
sample_activations.py is one sample, or a document that is joined from several. open_shards.py keeps
shards open and reads what lies beside them, and folders.py finds the folders of all machines and
hosts. This folder imports no JAX and never runs pickled code.
"""
