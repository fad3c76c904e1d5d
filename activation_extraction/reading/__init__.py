"""Reads the output of a run, whether it is finished or still going on.

dataset.py is ActivationDataset. Its batches are shuffled in an order that depends on the seed
alone: token_source.py orders the chunks of the shards, windows.py reads them ahead, batches.py
shuffles the tokens of a window. folders.py finds the folders of all machines and hosts; status.py
finds the state of each, and status_table.py adds them up and prints them; verify.py checks them,
report.py describes them and export.py converts them. This folder imports no JAX and never runs
pickled code.
"""
