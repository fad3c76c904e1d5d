"""Carries out a run, on one host or many.

    prepare.py           makes a run from a configuration: all that precedes compiling
    batch_size.py        chooses the rows of a batch
    host_text.py         the text of a run: one host's share of the data, as batches
    prefetch.py          prepares batches in the background
    open_data.py         opens the data that a run reads
    data_files.py        the files of the data, and whether they are still the same
    tokenizer_choice.py  chooses the tokenizer and the chat template
    inputs.py            the inputs of a run, and what must be the same between starts and hosts
    digests.py           digests and fingerprints of files
    hosts.py             joins the hosts, compares what they have, and keeps them at the same step
    summary.py           words what a run prints about itself
    recompute.py         recomputes stored samples for --verify
    reread.py            reads the text of stored samples again, where not all tokens are stored
    estimate.py          --plan
    topologies.py        the machines that --plan knows
    demo.py              makes the inputs of --demo

This room alone knows model, text and output together.
"""
