"""Contains what all other rooms may use: errors, the log, the filter of text, and file formats.

    errors.py           the two kinds of failure, and their exit statuses
    log.py              the log
    visible.py          filters all text that leaves the program
    retries.py          rewords what libraries log about requests that they retry
    interrupts.py       ends the process on Ctrl-C
    late_imports.py     imports transformers when it is needed
    host_memory.py      how much memory this process can use
    choices.py          choices and defaults of flags that several rooms use
    positions.py        parses rules for positions (--positions)
    tokenizer_files.py  the names of a tokenizer's files
    encodings.py        float8: activations in one byte per value
    codes.py            codes: the active features of autoencoders, as sparse rows
    safetensors.py      the headers of safetensors files, which are shards or weights
    allow_list.py       unpickles without running code

This room imports no JAX, and nothing from the other rooms.
"""
