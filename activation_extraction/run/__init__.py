"""One run, on one host or many. Only this folder knows model, text and output together.

prepare.py turns a checked command line into a job. hosts.py joins the hosts, compares what must be
the same on all of them (fingerprint.py lists it), and ends a process that is stuck; lockstep.py
keeps the hosts at the same step. host_text.py opens one host's share of the text. repair.py and
recompute.py serve --repair and --verify, demo.py makes the demo's inputs, and summary.py words what
a run prints about itself.
"""
