"""Looks at the output of a run, for the flags --status, --verify, --report and --export.

--verify also looks at hidden states that other programs have stored.

    look.py            calls the function that belongs to the flag
    status.py          --status: the state of every host, and the totals
    verify.py          --verify: checks all files, and compares samples with recomputed ones
    verify_states.py   --verify: compares another program's hidden states with the model's
    compare_states.py  compares the hidden states of a file and of a model, token by token
    hidden_states.py   reads the hidden states that speculators and SpecForge have stored
    report.py          --report: an HTML file about the activations, from report.jinja
    report_numbers.py  the numbers in the report
    report_charts.py   the charts in the report
    dataset_card.py    the dataset card beside the report, for the Hugging Face hub
    export.py          --export: copies a finished run to files that another program reads
    export_format.py   what each format of --export has to implement
    sae_lens_files.py  the files of SAELens, which trains autoencoders
    draft_files.py     the files of the trainers of draft models: speculators and SpecForge
    latent_files.py    the files of delphi, which explains features
    nla_files.py       the files of natural language autoencoders, with the text before each token
    arrow_files.py     writes the Arrow folders that `datasets.load_from_disk` reads

This package imports no JAX, so that it needs no accelerator. It never runs pickled code, because
the files may come from somebody else.
"""
