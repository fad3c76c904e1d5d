"""Turns the rows of a data set into packed batches of tokens.

A row passes these modules in this order:

    file_list      lists the files of a data set, and refuses those that would store wrong rows
    sources        opens files, or a data set of the hub, as a stream of rows, shuffled or not
    file_rows      reads the rows of a file by its kind: JSON, CSV, Parquet or Arrow
    documents      takes this host's share of the rows, mixes several data sets, skips bad rows
    rows           declares what is read of a row: content, id, and the columns to keep
      readers      reads text, token ids, or an ARC-AGI task
      chat         reads a conversation, and renders it by the chat template
      roles        finds the role of every character of a rendered conversation
      structs      distinguishes the nulls of Arrow's objects from those of JSON
    tokens         turns contents into token ids, with the role and turn of each token
      tokenizer    loads the tokenizer of a model or adapter
    samples        cuts or splits documents into samples, and continues where a run stopped
      token_choice chooses which tokens of a sample are kept
    packing        lays groups of samples out in the rows of batches

sample_facts has what is known of a sample beside its tokens, mark the places from which the stream
of samples continues, and batch the other types that leave this room. run/host_text.py puts the
stream together as the flags say. This room imports no JAX, and knows nothing of the model or of
what is stored.
"""
