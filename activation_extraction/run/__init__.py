"""This folder holds one run, on one host or many; it alone knows model, text and output together.

prepare.py turns a checked command line into a job, in the folders of run_folders.py and with the
rows that batch_size.py chooses. host_text.py makes batches of the data that open_data.py opens,
with the tokenizer that tokenizer_choice.py chooses. inputs.py says what must be the same between
starts and hosts, data_files.py and digests.py whether files are. hosts.py joins the hosts, compares
what must be the same on all of them, and keeps them at the same step. estimate.py serves --plan,
for the machines in topologies.py, and recompute.py --verify. demo.py makes the demo's inputs, and
summary.py words what a run prints about itself.
"""
