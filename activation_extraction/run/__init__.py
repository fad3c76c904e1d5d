"""One run on one or many hosts: joining, agreement, the watchdog, the loop, the demo.

The only room that knows model, text and output together.
"""
