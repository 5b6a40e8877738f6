"""Rehearse training on two machines: two network namespaces with a virtual cable, two processes in each (root; `ip` of iproute2).

    python tools/two_hosts.py [DIR]

Each machine has its own token files and its own --out. Four runs: undisturbed; a worker of machine 2 killed, restarted by itself;
another token file on machine 2, which must be refused with one line; and FSDP with one --out for both, of which every process
writes its part. Ends with one JSON line.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HOSTS = ("10.77.0.1", "10.77.0.2")
RECIPE = "steps = 20\nbatch_size = 8\ncontext = 32\nlog_every = 1\neval_every = 20\nsave_every = 5\n"
RECIPE += "device = 'cpu'\nsample_tokens = 0\n"
RECIPE += "[data]\ntokens = 'tokens'\n[model]\nn_layer = 2\nn_embd = 32\nn_head = 2\nn_positions = 32\n[optim]\nlr = 0.01\n"


def cable() -> list[str]:
    names = [f"gpt2-{os.getpid()}-{n}" for n in (1, 2)]
    for name in names:
        run("ip", "netns", "add", name)
    run("ip", "-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
    for name, address in zip(names, HOSTS, strict=True):
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            run("ip", "-n", name, "link", "set", link, "up")
    return names


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def start(
    namespaces: list[str], folder: Path, job: str, out: list[Path], *words: str, restarts: int = 3
) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    agents = []
    for host, (namespace, address) in enumerate(zip(namespaces, HOSTS, strict=True)):
        torchrun = (
            f"--nnodes 2 --nproc-per-node 2 --max-restarts {restarts} --rdzv-backend c10d --rdzv-id {job} --local-addr {address}"
        )
        meeting = f"--rdzv-endpoint {HOSTS[0]}:29400 --rdzv-conf is_host={1 - host} -m gpt2 train {folder}/r.toml"
        line = [
            "ip",
            "netns",
            "exec",
            namespace,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *torchrun.split(),
            *meeting.split(),
        ]
        with open(folder / f"{job}-{host + 1}.log", "wb") as log:
            agents.append(
                subprocess.Popen(
                    [*line, "--out", str(out[host]), *words],
                    cwd=folder / f"machine-{host + 1}",
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
    return agents


def ended(agents: list[subprocess.Popen[bytes]]) -> list[int]:
    return [agent.wait(900) for agent in agents]


def worker(agent: subprocess.Popen[bytes]) -> int:
    tasks = Path(f"/proc/{agent.pid}/task").glob("*/children")
    children = [int(pid) for found in tasks for pid in found.read_text().split()]
    return next(pid for pid in children if b"gpt2" in Path(f"/proc/{pid}/cmdline").read_bytes())


def best(out: Path) -> bytes:
    return (out / "best" / "model.safetensors").read_bytes()


def main() -> None:
    from gpt2.data.chars import Chars

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).resolve()
    (folder / "r.toml").write_text(RECIPE)
    for host in ("machine-1", "machine-2"):
        tokens = folder / host / "tokens"
        tokens.mkdir(parents=True)
        Chars.from_text("abcdefghijklmnopqrstuvwxyz").save(tokens, n_positions=32)
        for name, count in (("train.bin", 50_000), ("val.bin", 2_000)):
            (np.random.default_rng(1).integers(0, 26, count) * np.arange(count) % 26).astype("<u2").tofile(tokens / name)
    namespaces, result = cable(), dict[str, object]()
    try:
        outs = {name: [folder / f"machine-{n}" / name for n in (1, 2)] for name in ("whole", "killed", "other")}
        result["undisturbed"] = ended(start(namespaces, folder, "whole", outs["whole"]))
        agents, metrics = start(namespaces, folder, "killed", outs["killed"]), outs["killed"][0] / "metrics.jsonl"
        while not metrics.is_file() or metrics.read_text().count('"loss"') < 8:
            time.sleep(0.05)
        os.kill(worker(agents[1]), signal.SIGKILL)
        result["a worker killed"] = ended(agents)
        result["the same bits"] = best(outs["whole"][0]) == best(outs["killed"][0])
        shared = [folder / "shared"] * 2
        result["fsdp, all write"] = ended(start(namespaces, folder, "fsdp", shared, "--set", "parallel=fsdp"))
        result["parts"] = len(list((shared[0] / "step-20").rglob("shard-*")))
        (folder / "machine-2" / "tokens" / "train.bin").write_bytes(b"\1\0" * 50_000)
        result["another token file"] = ended(start(namespaces, folder, "other", outs["other"], "--set", "steps=21", restarts=0))
        said = (folder / "other-1.log").read_text() + (folder / "other-2.log").read_text()
        result["refused"] = next((line for line in said.splitlines() if "another text" in line), "")
        speeds = json.loads(next(line for line in (outs["whole"][0] / "metrics.jsonl").open() if '"loss"' in line))
        result["tokens per second by rank, step 1"] = [round(speed) for speed in speeds["rank_tokens_per_second"]]
    finally:
        for namespace in namespaces:
            run("ip", "netns", "del", namespace)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
