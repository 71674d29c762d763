"""This process: how it was started, its rank, and its connections to the others.

origin.py    by duoka, which sets everything; in a group that exists already; by an engine; or alone
process.py   state of this process as a whole
"""
