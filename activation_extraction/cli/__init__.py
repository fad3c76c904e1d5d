"""Contains the command line: the flags, the configuration, progress, and signals.

    flags.py    the table of flags, and the configuration that consists of their values
    declare.py  functions that declare the flags of the table
    values.py   parsers of the text after a flag
    config.py   the command line and --help: environment variables, defaults, and checks
    console.py  shows the progress of a run, and stops the run on signals

This package imports no JAX, and only the package `common`. Other packages import the parts of the
configuration from flags.py.
"""
