"""Make the README's pictures by the README's own commands: ``python tools/pictures.py`` (Chromium, 2 minutes).

Each picture says in its metadata which figures it shows, and a test holds them against the README's text.
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
HEIGHTS = {"compare": 1475, "explore": 1510}  # CSS pixels; each is 1160 wide


def shows(command: str, result: dict) -> str:
    if command == "explore":  # as the README's text has them
        return " and ".join(f"{100 * lens['readings'][-1][-1]['top'][0]['probability']:.1f} %" for lens in result["lenses"])
    return "(perplexity {:.2f} → {:.2f})".format(*(result["distributions"][side]["perplexity"]["value"] for side in "ab"))


def main() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    marks = {"train": r"\$ ", "compare": r"\$ ", "explore": "`"}  # what stands before each command
    words = {name: re.search(rf"{mark}gpt2 ({name} [^`\n]*)", readme)[1] for name, mark in marks.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name, command in words.items():
            page = ["--html", "report.html"] if name == "explore" else []
            subprocess.run([sys.executable, "-m", "gpt2", *command.split(), *page, "--json", "a.json"], cwd=folder, check=True)
            if height := HEIGHTS.get(name):
                flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
                flags += [f"--user-data-dir={folder}/c", f"--window-size=1160,{height}", "--screenshot=a.png"]
                subprocess.run(["chromium", *flags, Path(folder, "report.html").as_uri()], cwd=folder, check=True)
                about = PngInfo()
                about.add_text("shows", shows(name, json.loads(Path(folder, "a.json").read_text())))
                small = Image.open(Path(folder, "a.png")).quantize(128)
                small.save(ROOT / ".github" / f"{name}.png", pnginfo=about, optimize=True)


if __name__ == "__main__":
    main()
