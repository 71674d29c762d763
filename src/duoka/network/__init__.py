"""Connections between the processes of a run.

interfaces.py   network interfaces of this machine and their addresses
keys.py         the key of a run, with which its processes authenticate each other
connection.py   an authenticated TCP connection for JSON messages
signing.py      signed pickles
rendezvous.py   torch's stores, in which ranks find each other's addresses
"""
