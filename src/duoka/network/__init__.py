"""Connections between the processes of a run.

addresses.py    addresses and interfaces of this machine, and sockets that listen there
keys.py         the key of a run, with which its processes authenticate each other; signed pickles
connection.py   authenticated TCP connections for JSON messages, and a channel to all machines
rendezvous.py   torch's stores, in which ranks find each other's addresses
"""
