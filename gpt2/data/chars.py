"""A vocabulary of characters: those of a text."""

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from gpt2.data.byte_level import LETTER
from gpt2.data.library import LibraryTokenizer
from gpt2.data.tokenizer import refuse_surrogates
from gpt2.errors import InputError


def chars_of(text: str) -> LibraryTokenizer:
    """Return a tokenizer whose ids are the text's characters, in code point order. Raises InputError: none, or a surrogate.

    So it is in nanoGPT's `shakespeare_char` and most from-scratch tutorials (65 ids for tiny Shakespeare). A text has about three
    times as many tokens as with GPT-2's BPE.
    """
    refuse_surrogates(text)
    if not text:
        raise InputError("no characters to make a vocabulary of; give a text that is not empty")
    table = {char: i for i, char in enumerate(sorted(set(text)))}
    pipeline = Pipeline(models.WordLevel(table, unk_token="<unk>"))  # not in vocab: transformers then raises too
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(LETTER), "isolated")
    pipeline.decoder = decoders.Fuse()
    return LibraryTokenizer(pipeline)
