"""One pipeline with each of several backends: `mode=compare compare.axis=rollout compare.options=[hf,torch]`.

cells.py     which runs those are, and what is wrong with the comparison as a whole
work.py      every run as a process of its own, in turn, so that what the machine does meanwhile hits all alike
measure.py   what is measured, and what is the middle and the spread of it
busy.py      what other programs did to the machine meanwhile
drift.py     how far the log-probs of one engine are from those of another
report.py    everything together, and compare.json
table.py     what a person reads in the terminal
page.py      compare.html

A run is started and stopped as a job of a sweep is (pipeline/sweep/). All that is told is read from the directories of
the runs.
"""
