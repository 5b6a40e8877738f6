"""References with other claims than those that gpt2 wrote."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpt2.comparison.reference_file import TOP, _checksums, about_of, checksum


def forged(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Path:
    """Write a reference again with other claims, and the checksums that fit them."""
    arrays, about = load_file(path), about_of(path)
    change(about, arrays)
    about["checked"] = checksum({n: array for n, array in arrays.items() if n in ("ids", "token_bytes") or n.startswith("at.")})
    rows = tuple(arrays[name] for name in (TOP if "rest" in arrays else ("logits",)))
    crc = torch.tensor(_checksums(rows))[:, None]
    arrays["crc32"] = (crc >> torch.tensor([0, 8, 16, 24]) & 255).to(torch.uint8)
    text = json.dumps(about)
    out = path.with_name("forged.safetensors")
    save_file(arrays, out, {"about": text, "about_crc32": str(zlib.crc32(text.encode()))})
    return out
