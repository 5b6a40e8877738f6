"""Expected exit code of `gpt2 diagnose` for each file of tests/support/faulty/hostile: 0 equal, 1 mismatch, 2 bad input."""

from pathlib import Path

RUN = {"sound": 0, "beside": 0, "prints": 0, "returns_flat": 0, "hangs_at_the_end": 0, "training_dropout": 1}
HOSTILE = {path.stem: RUN.get(path.stem, 2) for path in sorted((Path(__file__).parent / "hostile").glob("*.py"))}
