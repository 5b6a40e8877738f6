"""Read from an operator's recorded inputs and result what it computed, by fitting families of mistakes."""
