"""Make the README's picture of a comparison by the README's own commands: ``python tools/pictures.py`` (Chromium, 2 minutes).

The picture says in its metadata which figures it shows, and a test holds them against the README's text.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).parents[1]
SIZE = (1160, 1475)  # CSS pixels


def main() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [re.search(rf"^\$ (gpt2 {word} .*)$", readme, re.MULTILINE)[1] for word in ("train", "compare")]
    with tempfile.TemporaryDirectory() as folder:
        for command in (commands[0], f"{commands[1]} --json result.json"):
            subprocess.run([sys.executable, "-m", *command.split()], cwd=folder, check=True)
        result = json.loads(Path(folder, "result.json").read_text())["distributions"]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        page = Path(folder, "report.html").as_uri()
        chromium = ["chromium", *flags, f"--user-data-dir={folder}/c", size, "--screenshot=a.png", page]
        subprocess.run(chromium, cwd=folder, check=True)
        about = PngInfo()
        a, b = (result[side]["perplexity"]["value"] for side in "ab")
        about.add_text("shows", f"(perplexity {a:.2f} → {b:.2f})")
        Image.open(Path(folder, "a.png")).quantize(128).save(ROOT / ".github" / "compare.png", pnginfo=about, optimize=True)


if __name__ == "__main__":
    main()
