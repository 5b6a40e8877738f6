"""Damaged safetensors files by the thousand, beside the safetensors library."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
from support.safetensors_fuzz import STRICTER, header

from gpt2.checkpoint.containers import HEADER_LIMIT
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.errors import CheckpointError

TESTS = Path(__file__).parents[1]


def fuzz(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """What `safetensors_fuzz.py` found, in a process that may crash or hang without taking the tests along."""
    command = [sys.executable, "-X", "faulthandler", "-m", "support.safetensors_fuzz", str(count), str(seed), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    child = subprocess.run(command, capture_output=True, text=True, timeout=120 + count / 50, env=environment, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout.splitlines()[-1])
    print(found)
    assert found["both"] + sum(found["refused"].values()) == count
    assert found["slowest_s"] < 3
    assert found["grown_mb"] < 50
    return found


def test_damaged_headers_open_as_in_the_library_or_are_refused(tmp_path: Path) -> None:
    """A JSON that two readers understand differently is how one of them is led past the other's checks."""
    found = fuzz(3000, 0, tmp_path)
    assert found["both"] > 400
    assert len(found["refused"]) > 10
    assert sum(found["refused"].values()) > 1500


@pytest.mark.slow
def test_a_hundred_thousand_damaged_headers(tmp_path: Path) -> None:
    """The same, longer, from another seed, until every stricter rule but the largest has been met."""
    found = fuzz(100_000, 1, tmp_path)
    assert found["both"] > 15_000
    assert len(found["stricter"]) >= len(STRICTER) - 2


ROW = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
WHERE_WE_ARE_STRICTER = {
    "a key occurs twice: which is meant?": ROW + b"," + ROW[1:] + b"}",
    "no brace at its very beginning, as the format demands": b"\n" + ROW + b"}",
    "__metadata__ that is null": ROW + b',"__metadata__":null}',
    "a dtype that torch's GPT-2 has no use for": b'{"a":{"dtype":"U32","shape":[1],"data_offsets":[0,4]}}',
    "more than eight axes": b'{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}',
    "an empty tensor whose other axes make 2**48 or more": ROW
    + b',"b":{"dtype":"F32","shape":[0,16777216,16777216],"data_offsets":[4,4]}}',
    "a header of more than 4 MB": ROW + b"}" + b" " * HEADER_LIMIT,
}


@pytest.mark.parametrize("rule", STRICTER)
def test_each_stricter_rule_is_one(rule: str, tmp_path: Path) -> None:
    """The list is what we refuse though the library accepts it; a rule that the library has too has no place on it."""
    text = WHERE_WE_ARE_STRICTER[rule]
    content = len(text).to_bytes(8, "little") + text + bytes(4)
    words, holds = STRICTER[rule]
    assert safetensors.deserialize(content)
    assert holds(header(content), content)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        SafetensorsFile(tmp_path / "a.safetensors")


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"9" * 400, b"9" * 5000, b"NaN", b"-Infinity"])
def test_a_number_that_no_float_holds_is_refused_anywhere(number: bytes, tmp_path: Path) -> None:
    """Also where nobody reads it: the library takes the whole header for damaged."""
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":%s}}' % number
    content = len(text).to_bytes(8, "little") + text + bytes(4)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(content)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not JSON"):
        SafetensorsFile(tmp_path / "a.safetensors")


@pytest.mark.parametrize("number", [b"-0", b"1.0", b"1e0", b"-1", b"18446744073709551616"])
@pytest.mark.parametrize("where", [b"[%s,0]", b"[0,%s]"])
def test_a_size_is_a_whole_number(number: bytes, where: bytes, tmp_path: Path) -> None:
    """Python reads -0 as 0, and the library does not: found by the fuzzer."""
    text = b'{"a":{"dtype":"F32","shape":%s,"data_offsets":[0,0]}}' % (where % number)
    content = len(text).to_bytes(8, "little") + text
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(content)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="contradicts itself"):
        SafetensorsFile(tmp_path / "a.safetensors")
