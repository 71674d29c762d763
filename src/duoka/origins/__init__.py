"""This process: how it was started, its rank, and its connections to the others.

origin.py          by duoka, which sets everything; in a group that exists already; by an engine; or alone
communication.py   the connections between ranks
process.py         state of this process as a whole
"""
