"""Looks at the output of a run, for the flags --status, --verify, --report and --export.

    look.py            starts what the flag asks for
    status.py          --status: the state of every host, and the totals
    verify.py          --verify: checks all files, and compares samples with recomputed ones
    report.py          --report: an HTML file about the activations, from report.jinja
    report_numbers.py  the numbers in the report
    report_charts.py   the charts in the report
    export.py          --export: copies a finished run to a folder of files for a trainer
    trainer_files.py   the forms of --export, and the files of SAELens
    draft_files.py     the files of the trainers of draft models: speculators and SpecForge
    latent_files.py    the files of delphi, which explains features
    arrow_files.py     folders of Arrow files, as `datasets` reads them
    exported.py        what an export wrote and what it left out

This folder imports no JAX and never runs pickled code.
"""
