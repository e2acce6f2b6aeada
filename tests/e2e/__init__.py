"""The program as a user starts it: real processes through the command line of run.py, real data, real models.

    test_default.py    the default command learns; what lies in its run directory, to the last name
    test_backends.py   every backend by override, in sweeps; seeds; rewards that are functions; a row that hangs
    test_ends.py       placement in processes, and that nothing is left of a run however it ends
    test_plan.py       what cannot run is told at once, completely, before anything is started or written
    test_gsm8k.py      the recipe for a chat model
    test_vllm.py       rows stream from vLLM while others are generated; its engine ends with the run

A start costs seconds of imports, so each run is started once, two at a time, and the tests look at what it left (see
conftest.py). `mine/` is what a user would write: stages, functions and options of their own.
"""
