"""`duoka watch` and reports: read what other processes of the user's runs do, and show it.

record     the file by which a run is found, and its status board: both cost the run nothing more
sample     the counters of a rank at a moment, and the parts of its time between two
progress   lines and values of the script, its position in loops, and the time left
watcher    a run over time, and causes of lost time, in sentences
history    a whole run, in memory that does not grow
showing    tables for the terminal, and the same as JSON
html       pages and charts that need nothing else
page       the page about a run: a report at its end, or served while it goes on, on this machine only
"""
