"""Text out of tokens as they come, in whole characters."""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # what bytes that are no character (yet) decode to


class Detokenizer:
    """What tokens add to a text, given out in whole characters.

    A character may take several tokens (bytes), and how a token reads may depend on those before it (the space that
    some tokenizers write before a word, but not before the first). So the newest tokens are read together with the last
    ones given out, and what could still become another character is held back. The pieces join to the text that the
    tokenizer makes of all tokens at once, except that a run of single bytes of which some are no character keeps those
    that are. mlx-lm's detokenizers do this for tokenizers of transformers; this one needs ``decode`` only.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], special: frozenset[int] = frozenset()):
        """``decode`` turns tokens into text; ``special`` ones have no text and are passed over."""
        self._decode, self._special = decode, special
        self._context: list[int] = []  # tokens given out, which those to come are read with
        self._held: list[int] = []  # tokens that are not given out whole
        self._given = 0  # characters of ``_held`` that were given out

    def add(self, tokens: Sequence[int]) -> str:
        """The characters that are whole with these tokens; perhaps none."""
        piece = ""
        for token in tokens:
            if token not in self._special:
                self._held.append(token)
                piece += self._read()
        return piece

    def _read(self) -> str:
        before, text = self._decode(self._context), self._decode(self._context + self._held)
        if not text.startswith(
            before
        ):  # single bytes: with broken ones behind them, whole ones read as broken too
            before, text = "", self._decode(self._held)
        text = text[len(before) :]
        whole = text.rstrip(_BROKEN)
        piece = whole[self._given :]
        self._given = max(self._given, len(whole))
        if whole == text:
            self._context, self._held, self._given = self._held, [], 0
        return piece
