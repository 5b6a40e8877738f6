"""GPT-2s that are no torch modules: right programs in NumPy, mistakes that are written into them as text, and their dumps."""
