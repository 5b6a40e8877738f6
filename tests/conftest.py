"""Tests run on both cores, one process each: a process then keeps to one thread, or the two would wait for each other."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
