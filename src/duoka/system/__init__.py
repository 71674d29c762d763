"""The operating system and the terminal.

disk        crash-safe writes: a file is the old or the new one
libc        functions of the C library that Python does not offer
messages    what duoka says: lines, untrusted text without control characters, seconds in words
processes   the state of a process; a unique name of this machine; the folder in which a user's processes share files
time_limit  a call with a time limit
user_code   whose a file is, the running line of the script, and functions that are called after an import
"""
