"""A large file from a Hub on loopback: over HTTP, as we resume it, beside Xet, as the client's library does it.

    python tools/bench_hub.py --size 1000 --rounds 3

The server is a process of its own, written in Python: it limits both, and there is no line to speak of. Each download is a
process of its own, in turn (A B A B), into an empty cache, and is hashed at the end as always. Peak memory is that of the whole
process, beside what Python and the client's imports need. Ends with one line of JSON.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

SERVE = """
import sys
from pathlib import Path
from support.hub_standin import HubStandIn
from support.xet_standin import XetStandIn
with HubStandIn() as hub:
    hub.xet = XetStandIn(hub)
    hub.add_repo("org/name", {"config.json": b"{}", "model.safetensors": Path(sys.argv[1])}, lfs=("model.safetensors",))
    print(hub.endpoint, flush=True)
    sys.stdin.read()
"""
FETCH = """
import json, resource, sys, time
import huggingface_hub.file_download
from gpt2.checkpoint.hub import resolve
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.perf_counter()
path = resolve("org/name").path
seconds = time.perf_counter() - begin
after = resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime
print(json.dumps(dict(seconds=seconds, cpu=cpu, before_mb=before / 1024, peak_mb=after.ru_maxrss / 1024)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000, help="MB (default 1000)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "weights")
        with weights.open("wb") as file:
            for number in range(args.size):
                file.write(hashlib.shake_128(b"%d" % number).digest(1_000_000))
        results = measure(weights, args.rounds, Path(folder, "home"))
    for name, runs in results.items():
        spread = {key: sorted(run[key] for run in runs) for key in runs[0]}
        middle = {key: statistics.median(values) for key, values in spread.items()}
        print(
            f"{name:5}  {middle['seconds']:6.2f} s ({spread['seconds'][0]:.2f} to {spread['seconds'][-1]:.2f})"
            f"  {args.size / middle['seconds']:6.0f} MB/s  {middle['cpu']:5.1f} s of CPU"
            f"  peak {middle['peak_mb']:5.0f} MB, {middle['before_mb']:4.0f} MB before"
        )
    print(json.dumps({"mb": args.size, "results": results}))


def measure(weights: Path, rounds: int, home: Path) -> dict[str, list[dict[str, float]]]:
    """Each way's runs, one after the other, in turn."""
    paths = f"{ROOT}:{ROOT / 'tests'}"
    serve = [sys.executable, "-c", SERVE, str(weights)]
    server = subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": paths})
    assert server.stdin
    assert server.stdout
    results: dict[str, list[dict[str, float]]] = {"HTTP": [], "Xet": []}
    try:
        endpoint = server.stdout.readline().strip()
        for _ in range(rounds):
            for name in results:
                environ = {"PYTHONPATH": paths, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_XET_CACHE": str(home / "xet")}
                environ |= {"HF_XET_LOG_DEST": str(home / "log"), "HF_HUB_DISABLE_XET": "1" if name == "HTTP" else "0"}
                done = subprocess.run([sys.executable, "-c", FETCH], env=environ, capture_output=True, text=True, check=True)
                assert "not over Xet" not in done.stderr, done.stderr
                results[name].append(json.loads(done.stdout))
                shutil.rmtree(home)
    finally:
        server.stdin.close()
        server.wait()
    return results


if __name__ == "__main__":
    main()
