"""Carries out a run, on one host or many.

    prepare.py           makes a run from a configuration: everything that precedes compiling
    batch_size.py        chooses the number of rows in a batch
    host_text.py         makes batches from one host's share of the data
    prefetch.py          prepares batches in a background thread
    open_data.py         opens the data that a run reads
    data_files.py        checks that the files of the data have not changed since the run began
    tokenizer_choice.py  chooses the tokenizer and the chat template
    inputs.py            lists the inputs of a run, which must not differ between starts or hosts
    digests.py           computes digests and fingerprints of files
    hosts.py             joins the hosts, compares their settings, keeps them at the same step
    summary.py           writes the messages that a run prints about itself
    recompute.py         recomputes stored samples for --verify
    recompute_states.py  computes hidden states for samples that another program has stored
    reread.py            reads the text of stored samples again if not all their tokens are stored
    estimate.py          estimates a run for --plan
    topologies.py        lists the machines that --plan knows
    demo.py              makes the inputs of --demo

This package alone uses the model, the text and the store together.
"""
