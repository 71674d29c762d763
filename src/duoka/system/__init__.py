"""The operating system and the terminal.

libc.py             functions of the C library that Python does not offer
machine_name.py     a unique name of this machine
runtime_folder.py   the folder in which processes of one user find each other's files
time_limit.py       a call with a time limit
messages.py         lines of duoka's own on standard error
imports.py          functions that are called when a module has been imported
printable.py        untrusted text without control characters
seconds.py          seconds in words
"""
