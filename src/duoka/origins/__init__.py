"""This process: how it was started, its rank, and its connections to the others.

forked.py          by `duoka run` or `duoka.launch`, which set everything
origin.py          otherwise: in a group that exists already, by an engine, or alone
communication.py   the connections between ranks
process.py         state of this process as a whole
"""
