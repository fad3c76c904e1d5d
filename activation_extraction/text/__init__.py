"""Turns documents into packed batches.

A batch is made in this order: sources.py opens the data, documents.py picks this host's rows and
their text, samples.py tokenises the text and cuts it to --max_seq_length, and packing.py lays
samples out in rows and marks the tokens that are kept. batch.py has the types. This folder imports
no JAX and knows nothing of the model or of what is stored.
"""
