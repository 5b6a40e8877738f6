"""GPT-2s that are no torch modules: a set of programs in NumPy, and the dumps that they write.

A set is a folder: right programs that import nothing of ours, and mistakes that are written into them as replaced text.
tests/port/test_programs.py proves that the programs are right, and that each mistake shows.
"""
