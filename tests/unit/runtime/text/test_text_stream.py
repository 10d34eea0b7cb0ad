"""Incremental decoding: deltas add up to the one-shot decode, nothing is split or taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.engine.text import TextStream, longest_partial_stop


def byte_level_tokenizer() -> Tokenizer:
    """256 single bytes, three merged tokens that split characters, one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    to_chars = {byte: char for char in alphabet for byte in _bytes_of(char)}
    for piece in (b" a\xe4", b"\xb8\x96!", b"\x80\x80"):
        vocab["".join(to_chars[byte] for byte in piece)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def _bytes_of(char: str) -> bytes:
    table = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = 0
    for byte in range(256):
        if byte in printable:
            table[chr(byte)] = byte
        else:
            table[chr(256 + extra)] = byte
            extra += 1
    return bytes([table[char]])


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece style: `<0xXX>` bytes, words with a leading mark, left strip of one space."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ("\u2581", "\u2581a", "b", "\u2581\u4e16"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
ID_OF_BYTE = {
    _bytes_of(char)[0]: BYTE_LEVEL.token_to_id(char) for char in pre_tokenizers.ByteLevel.alphabet()
}


def ids_of(text: str | bytes) -> list[int]:
    data = text.encode() if isinstance(text, str) else text
    return [ID_OF_BYTE[byte] for byte in data]


def stream_deltas(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer, stop=stop)
    deltas = []
    for token_id in ids:
        is_stopped = stream.push(token_id)
        deltas.append(stream.take_delta())
        if is_stopped:
            break
    deltas.append(stream.finish())
    assert stream.finish() == ""
    assert "".join(deltas) == stream.text
    return deltas


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2), max_size=24))
def test_byte_level_deltas_equal_decode_for_any_ids(ids: list[int]) -> None:
    assert "".join(stream_deltas(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=16))
def test_byte_level_deltas_equal_any_text_and_never_split_a_character(text: str) -> None:
    deltas = stream_deltas(BYTE_LEVEL, ids_of(text))
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in delta for delta in deltas)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1),
            st.sampled_from([11, 0xE4 + 1, 0xB8 + 1, 0x96 + 1, 257, 258, 259, 260, 261]),
        ),
        max_size=20,
    )
)
def test_byte_fallback_deltas_equal_decode_for_any_ids(ids: list[int]) -> None:
    assert "".join(stream_deltas(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"A ", b"\xe4\xb8\x96", b"\xe4"],
        [b"A ", b"\xe4\xb8\x96", b"\xe4", b"a"],
        [b"A ", b"\xe4\xb8\x96", b"\xe4", b"a", b"b"],
        [b"e", "\u0301".encode(), b"x"],
        ["\U0001f1e9\U0001f1ea".encode()],
        [b"\xff", b"\xff", b"a"],
    ],
    ids=["open-end", "broken-then-a", "broken-then-ab", "combining", "flag", "invalid"],
)
def test_no_character_is_emitted_twice(pieces: list[bytes]) -> None:
    """The cases of an offset that moved backwards and repeated a character."""
    data = b"".join(pieces)
    deltas = stream_deltas(BYTE_LEVEL, ids_of(data))
    assert "".join(deltas) == data.decode(errors="replace")


def test_incomplete_sequence_is_held_back() -> None:
    stream = TextStream(BYTE_LEVEL, stop=())
    held = []
    for token_id in ids_of("\u4e16"):
        stream.push(token_id)
        held.append(stream.take_delta())
    assert held == ["", "", "\u4e16"]


def test_special_tokens_have_no_text_unless_asked() -> None:
    end = BYTE_LEVEL.token_to_id("<|end|>")
    assert "".join(stream_deltas(BYTE_LEVEL, [*ids_of("a"), end, *ids_of("b")])) == "ab"
    stream = TextStream(BYTE_LEVEL, stop=(), skip_special_tokens=False)
    stream.push(end)
    assert stream.take_delta() == "<|end|>"


def test_leading_space_is_stripped_once_after_a_special_token() -> None:
    begin = BYTE_FALLBACK.token_to_id("<s>")
    word = BYTE_FALLBACK.token_to_id("\u2581a")
    assert stream_deltas(BYTE_FALLBACK, [begin, word, word]) == ["", "a", " a", ""]


def test_stop_string_over_three_tokens_cuts_text_and_is_held_back() -> None:
    stream = TextStream(BYTE_LEVEL, stop=("abc",))
    deltas = []
    stopped = []
    for token_id in ids_of("xabc"):
        stopped.append(stream.push(token_id))
        deltas.append(stream.take_delta())
    assert stopped == [False, False, False, True]
    assert deltas == ["x", "", "", ""]
    assert stream.finish() == ""
    assert stream.text == "x"


def test_partial_stop_is_released_when_it_does_not_complete() -> None:
    assert stream_deltas(BYTE_LEVEL, ids_of("abx"), ("abc",)) == ["", "", "abx", ""]
    assert stream_deltas(BYTE_LEVEL, ids_of("ab"), ("abc",)) == ["", "", "ab"]


def test_stop_string_inside_one_token_and_earliest_of_two() -> None:
    piece = BYTE_LEVEL.token_to_id("".join(_chars(b" a\xe4")))
    stream = TextStream(BYTE_LEVEL, stop=("a", " a"))
    assert stream.push(piece)
    assert stream.text == ""


def test_newline_byte_stops_at_once_with_byte_fallback() -> None:
    stream = TextStream(BYTE_FALLBACK, stop=("\n",))
    assert not stream.push(BYTE_FALLBACK.token_to_id("b"))
    assert stream.push(BYTE_FALLBACK.token_to_id("<0x0A>"))
    assert stream.finish() == "b"


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="ab\u4e16", max_size=20),
    st.lists(st.text("ab\u4e16", min_size=1, max_size=3), max_size=3),
)
def test_stop_cut_equals_search_in_whole_text(text: str, stop: list[str]) -> None:
    deltas = stream_deltas(BYTE_LEVEL, ids_of(text), tuple(stop))
    ends = [(text.find(item) + len(item), text.find(item)) for item in stop if item in text]
    expected = text
    if ends:
        first_end = min(end for end, _ in ends)
        seen = text[:first_end]
        expected = text[: min(seen.find(item) for item in stop if item in seen)]
    assert "".join(deltas) == expected


def test_longest_partial_stop() -> None:
    assert longest_partial_stop("xab", ("abc", "bd")) == 2
    assert longest_partial_stop("xabc", ("abc",)) == 0
    assert longest_partial_stop("", ("abc",)) == 0


def _chars(piece: bytes) -> list[str]:
    inverse = {_bytes_of(char)[0]: char for char in pre_tokenizers.ByteLevel.alphabet()}
    return [inverse[byte] for byte in piece]
