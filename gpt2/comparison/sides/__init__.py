"""The sides of a comparison: one small file for each kind, behind the protocol of ``side.py``."""
