"""Read Keras' checkpoints, such as tf_model.h5: HDF5 files of nested groups. Needs the package h5py, and no TensorFlow.

Source: the files that transformers' TFGPT2LMHeadModel wrote: `transformer/tfgp_t2lm_head_model/transformer/h_._0/ln_1/gamma:0`,
where the second name differs. Matrices are [in, out]; a Conv1D's bias is (1, n). h5py says where each tensor lies, and
`MappedFile` reads it there. Links to other files are not followed.
"""

from typing import Any

import torch

from gpt2.checkpoint.containers import Container, Damaged, Entry, Refused, shown

SIGNATURE = b"\x89HDF\r\n\x1a\n"
DTYPES = {"<f2": torch.float16, "<f4": torch.float32, "<f8": torch.float64}


class KerasFile(Container):
    """A checkpoint of Keras; a tensor's name is its path in the file."""

    kind = "HDF5"

    def _directory(self) -> dict[str, Entry]:
        try:
            import h5py
        except ImportError:
            raise Refused("reading HDF5 needs h5py; pip install 'gpt2-toolkit[hdf5]'") from None
        entries: dict[str, Entry] = {}

        def add(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                entries[name] = self._entry(name, item)

        try:
            with h5py.File(self.path, "r") as file:
                file.visititems(add)
        except Damaged:
            raise
        except Exception as error:  # HDF5 reports damage by a dozen kinds of exceptions
            raise Damaged(f"is damaged ({type(error).__name__}: {' '.join(str(error).split())[:100]})") from None
        return entries

    def _entry(self, name: str, dataset: Any) -> Entry:
        """Return where a dataset lies. Raises Refused: not floats, or not in one piece."""
        if (dtype := DTYPES.get(dataset.dtype.str)) is None:
            raise Refused(f"{shown(name)} is {dataset.dtype.str}; the weights must be floats")
        start = dataset.id.get_offset()
        if dataset.external or dataset.is_virtual or start is None:
            raise Refused(f"does not hold {shown(name)} in one piece (compressed, or in another file); save it as safetensors")
        shape = dataset.shape
        if name.endswith("bias:0") and len(shape) == 2 and shape[0] == 1:
            shape = shape[1:]
        entry = Entry(dtype, shape, start)
        if entry.end > self._file.size:
            raise Damaged(f"is cut short: {shown(name)} ends at byte {entry.end:,} of {self._file.size:,}")
        return entry
