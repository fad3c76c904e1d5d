"""What the user types and sees.

flags.py is the table of flags, declared by means of declare.py, from which config.py makes the
command line and --help. It also adds environment variables and defaults, and refuses flags that do
not fit together. console.py shows progress and takes signals. This folder imports no JAX, and of
the other folders only `common`.
"""
