"""Many runs of one command line: `python run.py -m seed=0,1,2 advantage.estimator=grpo,rloo`.

points.py   which runs those are, and what is wrong with the sweep as a whole: Hydra's own parser and sweepers decide
jobs.py     a run as a process of its own, in a directory of its own; as many at a time as may run
stop.py     Ctrl-C and SIGTERM reach every job, also those that another program has started
board.py    what a person sees, and what is kept: the live table, sweep.csv and sweep.jsonl

Hydra starts the jobs: its sweepers choose the points, its launchers (ours in `hydra_plugins/`, joblib, submitit, ...)
run a function for each. That function only starts a fresh interpreter and waits, whoever calls it and where, so no
module, seed or CUDA context is ever shared. What happens is written into the directory of each job, and the table is
read from there: it looks the same under every launcher.
"""
