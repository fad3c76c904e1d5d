"""Turns a data set into packed batches.

A batch is made in this order. file_list.py lists the files of a data set, sources.py opens them and
data sets of the hub, in their order or that of a seed, and file_rows.py reads the rows of files.
documents.py picks this host's rows, and merges several data sets. rows.py takes what a row has:
text, token ids, or a conversation, which chat.py reads and renders and in which roles.py finds the
roles. pretrained.py loads a tokenizer, tokenizer.py makes token ids of documents with it,
samples.py cuts or splits them, and token_choice.py says which of their tokens are kept. packing.py
lays groups of samples out in rows. batch.py has the types of this; of a sample, sample_facts.py has
all that is known beside its tokens. This folder imports no JAX and knows nothing of the model or of
what is stored.
"""
