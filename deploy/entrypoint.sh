#!/bin/bash
# What the image runs: `-c "..."` is for bash, anything else for extract_activations.py.
if [[ ${1:-} == -c ]]; then
    exec bash "$@"
fi
exec python "${BASH_SOURCE[0]%/*}/../extract_activations.py" "$@"
