"""What the user types and sees: flags, the configuration that they make, progress and signals.

    flags.py    the table of flags, and the configuration that they make
    declare.py  how a flag of the table is declared
    values.py   parsers of what is typed after a flag
    config.py   the command line and --help: environment variables, defaults, and checks
    console.py  shows progress and takes signals

This room imports no JAX, and of the other rooms only `common`. Other rooms import the parts of the
configuration from flags.py.
"""
