"""Reads the output of a run, whether it is finished or still going on.

dataset.py is ActivationDataset; batches.py and token_source.py shuffle its tokens into batches, in
an order that depends on the seed alone. folders.py finds the folders of all machines and hosts, and
how many hosts each machine has; status.py and status_table.py sum them up, verify.py checks them,
report.py describes them and export.py converts them. This folder imports no JAX and never runs
pickled code.
"""
