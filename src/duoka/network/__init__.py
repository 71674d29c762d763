"""Connections between the processes of a run.

keys.py         the key of a run, with which its processes authenticate each other; signed pickles
connection.py   authenticated TCP connections for JSON messages, and a channel to all machines; addresses
rendezvous.py   torch's stores, in which ranks find each other's addresses
"""
