"""Turns the rows of a data set into packed batches of tokens.

A row passes these modules in this order:

    file_list.py       lists the files of a data set, and rejects folders with several splits
    sources.py         opens files, or a hub data set, as a stream of rows, shuffled or not
    file_rows.py       reads the rows of a file by its kind: JSON, CSV, Parquet or Arrow
    documents.py       selects this worker's rows, mixes several data sets, skips bad rows
    rows.py            declares the columns to read of a row: content, id, and columns to keep
      readers.py       reads text, token ids, or an ARC-AGI task
      chat.py          reads a conversation, and renders it with the chat template
      roles.py         finds the role of every character of a rendered conversation
      structs.py       removes the nulls that Arrow adds for missing keys, not the nulls of JSON
    tokens.py          turns contents into token ids, with the role and turn of each token
      tokenizer.py     loads the tokenizer of a model or adapter
    samples.py         cuts or splits documents into samples, and continues where a run stopped
      token_choice.py  chooses the tokens of a sample whose activations are stored
    packing.py         packs groups of samples into the rows of batches

Other packages use these types:

    sample_facts.py    the facts of a sample, which are stored beside its tokens
    mark.py            marks, from which the stream of samples continues
    batch.py           workers, samples and batches

run/host_text.py builds the stream from the flags. This package imports no JAX, and does not depend
on the model or on stored files.
"""
