"""Logit lens and attention maps of one model or two, as a page."""
