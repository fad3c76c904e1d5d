"""This folder holds one run, on one host or many; it alone knows model, text and output together.

prepare.py turns a checked command line into a job, with the text of host_text.py; inputs.py says
what must be the same between starts and hosts, data_files.py and digests.py whether files are.
hosts.py joins the hosts, compares what must be the same on all of them, and keeps them at the same
step. recompute.py serves --verify, demo.py makes the demo's inputs, and
summary.py words what a run prints about itself.
"""
