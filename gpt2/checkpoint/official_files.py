"""The sha256 of the official GPT-2 files, and the comparison of a checkpoint's files with them.

At least two independent public sources state each hash: the Hub's listing, as other projects pinned it, or a sha256sum of the
file. Sources of the weights:

    gpt2          conformance notes and lock files of several projects, for revision 607a30d
    gpt2-medium   ALLPROTO/core-lm-cross-model-lab ``models.json``, soyuniverse/NetLLM's artifact manifest: revision 6dcaa7a
    gpt2-large    SyedNaveedMahmood/kd-sink ``protocols/s1_artifact_partial_v1.json``, and the model table of a project on
                  reward-guided decoding, which hashed its local copy: revision 32b71b1
    gpt2-xl       mikepfrank/GPT-2-tools, whose author hashed the file, and hyunjun1127/ODE-edit: revision 15ea56d
    distilgpt2    two projects' download manifests, for revision 2290a62

Not listed: ``pytorch_model.bin`` of gpt2-large (one source), gpt2-medium and gpt2-xl (none). A checkpoint with such a file is
reported as unknown, never as wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpt2.checkpoint.names import OFFICIAL

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack")
_SHARED = {
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "tokenizer.json": "8414cab924d8b9b33013f0d221c5862f365ee9be39c5c2bfae8a5a9e970478a6",
    "tokenizer_config.json": "5e04eb606e3a1583530a42e36c2a6b6615c86f34fe77e44d9ddeb43ff940931f",
    "generation_config.json": "b90eadacf585a743a30ea51e8b5c88b8d282a2a34dc0c7e556d0987cdbd68805",
}
OFFICIAL_FILES: Mapping[str, Mapping[str, str]] = {
    "gpt2": _SHARED
    | {
        "model.safetensors": "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707",
        "pytorch_model.bin": "7c5d3f4b8b76583b422fcb9189ad6c89d5d97a094541ce8932dce3ecabde1421",
        "tf_model.h5": "d08c1307f7dfae6f878e0a2ca5715d587d2640530db8ef96fc0c1fc474dd9fee",
        "flax_model.msgpack": "192e8257ae9e8f796f764630f4a488a6a16d1461762d62b49ef7405df951a283",
        "config.json": "0daed7749b4f02b8f76240d5444551d7b08712dab4d0adb8239c56ba823bb7b4",
        "generation_config.json": "ed0b32ac72c0f5f44a719abb2d7786ea5146c871f83717b7f2018065954de02b",
    },
    "gpt2-medium": _SHARED
    | {
        "model.safetensors": "fc5a354a19255ad494f3d71549390baca1ccf61d1d822b9408971705c687c9cd",
        "config.json": "ef1a44d889ad1a0acc7731c78134f1b87d2d222f110e97dd10fd4117331caf22",
    },
    "gpt2-large": _SHARED
    | {
        "model.safetensors": "5f47f3e12f91cd33b662ce7e433b6150ad5512b5884a2cee961b50e9c3bbebce",
        "config.json": "7fccdcfd6622055342a734c663ee0b61ff4fd697f42467595df0bf4448c8c170",
    },
    "gpt2-xl": _SHARED
    | {
        "model.safetensors": "0f8b28eb05a8075f48b61b6f35332978c74fc7763fa9fb4051a1c30511736a6a",
        "config.json": "be48115d52314bc27327e160bf10197760db02ea689d10adb24db4102edf7a8a",
    },
    "distilgpt2": _SHARED
    | {
        "model.safetensors": "e1ff18884359fe8beb795a5f414feb85a6ce3d929ad019c0d958c039d2b94a1b",
        "config.json": "4ec5947c1d59fee6212cdf3b0ec1a53eac02092554c5ff0a733488cbd2c64f3a",
    },
}

# sha256 of a small file -> its git blob hash, which the Hub lists instead.
GIT_BLOBS: Mapping[str, str] = {
    "0daed7749b4f02b8f76240d5444551d7b08712dab4d0adb8239c56ba823bb7b4": "10c66461e4c109db5a2196bff4bb59be30396ed8",
    "ed0b32ac72c0f5f44a719abb2d7786ea5146c871f83717b7f2018065954de02b": "3dc481ecc3b2c47a06ab4e20dba9d7f4b447bdf3",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5": "226b0752cac7789c48f0cb3ec53eda48b7be36cc",
    "8414cab924d8b9b33013f0d221c5862f365ee9be39c5c2bfae8a5a9e970478a6": "4b988bccc9dc5adacd403c00b4704976196548f8",
    "5e04eb606e3a1583530a42e36c2a6b6615c86f34fe77e44d9ddeb43ff940931f": "be4d21d94f3b4687e5a54d84bf6ab46ed0f8defd",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783": "1f1d9aaca301414e7f6c9396df506798ff4eb9a6",
    "ef1a44d889ad1a0acc7731c78134f1b87d2d222f110e97dd10fd4117331caf22": "7b40acf43d912d857c663046ac178ee3fd7ff2d0",
    "b90eadacf585a743a30ea51e8b5c88b8d282a2a34dc0c7e556d0987cdbd68805": "057e43033439e068b325f32af95dde9efc9552ae",
    "7fccdcfd6622055342a734c663ee0b61ff4fd697f42467595df0bf4448c8c170": "31587029033088429a7e344901883fa792f75bcc",
    "be48115d52314bc27327e160bf10197760db02ea689d10adb24db4102edf7a8a": "932bdee9f4b3878f7f285187564b46f256243aff",
    "4ec5947c1d59fee6212cdf3b0ec1a53eac02092554c5ff0a733488cbd2c64f3a": "fed02aafb76b46aa5da200966f9e42262e758023",
}


@dataclass(frozen=True)
class Official:
    """A comparison with the official files of ``model``; None if the model is unknown."""

    model: str | None
    weights: tuple[str, ...]  # official weight files
    same: tuple[str, ...]  # all official files
    different: tuple[str, ...]  # files with an official name and other content

    def __str__(self) -> str:
        differing = f"{', '.join(self.different)} differ{'s' * (len(self.different) == 1)} from {self.model}'s"
        if self.weights and not set(self.different) & set(WEIGHTS):
            return f"the official file of {self.model}" + (f"; {differing}" if self.different else "")
        if self.model is None:
            return "not an official file"
        return "not the official file" + (f": {differing}" if self.different else "")


def official_name(name: str) -> str | None:
    """Return ``"gpt2"`` for ``"gpt2"`` or ``"openai-community/gpt2"``, with or without ``@revision``; None for other names."""
    plain = name.partition("@")[0]
    return next((model for model, repository in OFFICIAL.items() if plain in (model, repository)), None)


def official_files(hashes: Mapping[str, str], name: str = "") -> Official:
    """Compare a checkpoint's files (name -> sha256) with the official ones of ``name``, else of the model that they match."""
    by_content = [*_holding(hashes, WEIGHTS), *_holding(hashes, ("config.json",))]
    model = official_name(name) or next(iter(by_content), None)
    known = OFFICIAL_FILES[model] if model else {}
    same = tuple(name for name, digest in hashes.items() if known.get(name) == digest)
    different = tuple(name for name, digest in hashes.items() if known.get(name, digest) != digest)
    weights = tuple(name for name, digest in hashes.items() if digest in [known.get(each) for each in WEIGHTS])
    return Official(model, weights, same, different)


def _holding(hashes: Mapping[str, str], files: tuple[str, ...]) -> list[str]:
    """Return the models that have one of their ``files`` among the hashes, under any name."""
    there = set(hashes.values())
    return [model for model, known in OFFICIAL_FILES.items() if there & {known[file] for file in files if file in known}]


def other_than_official(repository: str, declared: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files of an official repository whose declared hashes differ. A large file with only a git hash is skipped."""
    known = OFFICIAL_FILES.get(official_name(repository) or "", {})
    official = {name: digest for name, digest in known.items() if len(declared.get(name, "")) == 64}
    official |= {name: GIT_BLOBS[digest] for name, digest in known.items() if digest in GIT_BLOBS and name not in official}
    return tuple(name for name, digest in declared.items() if digest and official.get(name, digest) != digest)
