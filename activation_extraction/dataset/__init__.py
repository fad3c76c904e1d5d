"""Reads back the activations of a run, whether it is finished or still going on.

dataset.py is ActivationDataset. token_source.py has its tokens in chunks; batches.py shuffles them
in an order that depends on the seed alone, and windows.py does so in bounded memory. paired.py
reads several runs as one, and alignment.py finds the tokens that they have in common.
sample_activations.py is one sample, or a document that is joined from several. open_shards.py keeps
shards open and reads what lies beside them, and folders.py finds the folders of all machines and
hosts. This folder imports no JAX and never runs pickled code.
"""
