"""The words of a diagnosis: causes and their places, what rounding explains, limits of time, and the report."""
