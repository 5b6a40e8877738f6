"""A vocabulary of words: the most frequent ones of a text, each with the space before it."""

from collections import Counter

from gpt2.data.bpe import ends, entries_wanted, made_bpe, too_few
from gpt2.data.byte_level import PATTERN, byte_alphabet, openai_byte_order
from gpt2.data.files import END_OF_TEXT
from gpt2.data.library import LibraryTokenizer


def words_of(text: str, vocab_size: int) -> LibraryTokenizer:
    """Return a tokenizer of the 256 bytes, the most frequent words of two bytes or more, and the end of text.

    Words have the space before them, ties are in text order. Other words are bytes, so bits per byte compare with other models'.
    For the library it is a byte-level BPE without merges that accepts whole pieces. Raises InputError: `vocab_size` below 257, or
    too few words.
    """
    import regex  # also a dependency of tiktoken; `re` does not know \p{L}

    wanted, alphabet = entries_wanted(vocab_size, text), byte_alphabet()
    counts = Counter(piece for piece in regex.findall(PATTERN, text) if len(piece.encode()) > 1)
    if len(counts) < wanted:
        raise too_few(vocab_size, text, len(counts), "different words")
    words = ("".join(alphabet[byte] for byte in word.encode()) for word, _ in counts.most_common(wanted))
    tokens = [*openai_byte_order(), *words, END_OF_TEXT]
    vocab = {token: i for i, token in enumerate(tokens)}
    return made_bpe(vocab, [], [END_OF_TEXT], roles=ends(END_OF_TEXT), ignore_merges=True)
