"""`duoka watch` and reports: read what other processes of the user's runs do, and show it.

record     the file by which a run is found, and its status board: both cost the run nothing more
sample     the counters of a rank, read from the status board and /proc
parts      the parts of a rank's time, from two samples
watcher    a run over time
output_reader   lines and values of the script, with numbers found in lines by `numbers`
place      where the script is in its epochs and batches, and the time left
findings   causes of lost time, in sentences
showing    tables for the terminal, and the same as JSON
history    a whole run, in memory that does not grow
charts     lines and areas as SVG
document   pages of HTML that need nothing else
page       the report of a run, as such a page
serving    the same page while the run goes on, on this machine only
reported   takes samples while a run goes on, and writes its report
"""
