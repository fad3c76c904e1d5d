"""Reads back the activations of a run, whether it is finished or still going on.

dataset.py is ActivationDataset, and paired.py reads several runs as one, by the tokens that all of
them have. token_batch.py has tokens with their activations, in batches and samples. token_source.py
says what batches may be asked for, and which tokens of a run they have; batches.py gives them in an
order that depends on the seed alone, and windows.py does so in bounded memory; grain.py gives them
in any order, as records for grain. open_shards.py keeps shards open and reads what lies beside
them, and features.py tells where the features of autoencoders are active. This folder imports no
JAX and never runs pickled code.
"""
