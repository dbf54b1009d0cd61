"""Tokenizers and end tokens from a GGUF file's metadata.

transformers builds tokenizers from such files too, but knows few of the names of `tokenizer.ggml.pre`, leaves out
tokens such as DeepSeek's, and puts no space before text that follows a control token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvsieve.errors import KvsieveWarning, short
from kvsieve.models.fetch import ModelLoadError
from kvsieve.models.gguf.splitting import SPLITTINGS, Splitting

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from kvsieve.models.gguf.file import GgufFile

# Types of tokens, as the format numbers them.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
# Ends of a turn and of a text, which a chat's answer ends with, by their names.
_ENDS_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|endofturn|>"),
    *("<|return|>", "<|call|>", "<turn|>", "<end_of_utterance>", "<|user_end|>"),
)
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a file describes: padding on the left, with eos if it has no pad token.

    Honoured keys of `tokenizer.ggml`: model, pre, tokens, token_type, scores, merges, the ids of special tokens,
    add_bos_token, add_eos_token, add_space_prefix; and the chat templates.

    Raises:
        ModelLoadError: a kind of tokenizer, or a splitting, that is not known; a vocabulary that contradicts itself.
    """
    from transformers import PreTrainedTokenizerFast

    kind = file.get("tokenizer.ggml.model")
    build = _BUILDERS.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise _error(file, f"its tokenizer.ggml.model is {short(kind)}", f"one of {', '.join(_BUILDERS)}")
    words = _words(file)
    kinds = _kinds(file, len(words))
    # An ordinary word, as some files name for padding, stays one.
    ids = {name: number for name, number in special_ids(file).items() if _is_control(words[number], kinds[number])}
    try:
        backend = build(file, words, kinds)
        _add_tokens(backend, file, words, kinds, set(ids.values()))
        named = {name: words[number] for name, number in ids.items()}
        _add_ends(backend, file, named)
        tokens = {f"{name}_token": named[name] for name in ("bos", "eos", "unk", "pad") if name in named}
        if "eos" in named:
            tokens.setdefault("pad_token", named["eos"])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            padding_side="left",
            clean_up_tokenization_spaces=False,
            model_max_length=int(file.get(f"{file.architecture}.context_length", 1 << 60)),
            chat_template=_chat_template(file),
            **tokens,
        )
    except ModelLoadError:
        raise
    except Exception as error:
        # The package tokenizers has no exceptions of its own.
        raise _error(file, f"its vocabulary has an error ({error})", "words and merges that fit together") from error


def generation_of(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return a generation config with the file's special tokens and all tokens that end an answer.

    These are the file's eos, eot and eom tokens. With a chat template, the ends of turn that it writes and the
    vocabulary's ends of text are added.
    """
    from transformers import GenerationConfig

    ends = end_tokens(file, tokenizer)
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=tokenizer.pad_token_id,
    )


def end_tokens(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of tokens that end an answer, eos first; see `generation_of`."""
    ids = special_ids(file)
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    template = str(_chat_template(file) or "")
    controls = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if template:
        written = [name for name in _ENDS_OF_TURN if name in template]
        if "<|return|>" in controls:
            # There, <|end|> ends a part of an answer.
            written = [name for name in written if name != "<|end|>"]
        ends += [controls[name] for name in (*written, *_ENDS_OF_TEXT) if name in controls]
    return list(dict.fromkeys(ends))


def special_ids(file: GgufFile) -> dict[str, int]:
    """Return the ids of the special tokens that a file names: bos, eos, unk, pad, eot and eom."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
    # Files of the first years leave out those of SentencePiece.
    usual = {"bos": 1, "eos": 2, "unk": 0} if file.get("tokenizer.ggml.model") == "llama" else {}
    count = file.count("tokenizer.ggml.tokens")
    found = {}
    for name, spelled in keys.items():
        key = f"tokenizer.ggml.{spelled}_token_id"
        number = file.get(key, usual.get(name))
        if number is None:
            continue
        if isinstance(number, int) and 0 <= number < count:
            found[name] = number
        else:
            warnings.warn(
                f"{file.path}: {key} is {short(number)}, expected a token below {count}; it is left out",
                KvsieveWarning,
                stacklevel=3,
            )
    return found


def adds(file: GgufFile, end: str) -> bool:
    """Return whether prompts get the token `end` ("bos" or "eos") without asking."""
    kind = file.get("tokenizer.ggml.model")
    if kind == "gemma4":
        # The chat template writes it.
        return False
    usual = kind == "llama" or (kind == "gpt2" and splitting_of(file).begins)
    return bool(file.get(f"tokenizer.ggml.add_{end}_token", usual and end == "bos"))


def splitting_of(file: GgufFile) -> Splitting:
    """Return how a file's text is split before merging. Raises ModelLoadError for a name that is not known."""
    name = file.get("tokenizer.ggml.pre")
    if name is None:
        warnings.warn(
            f"{file.path} has no tokenizer.ggml.pre, so its text is split by a general rule that may not be the "
            "model's; convert the model again",
            KvsieveWarning,
            stacklevel=2,
        )
        name = "default"
    if not isinstance(name, str) or name not in SPLITTINGS:
        known = ", ".join(sorted(SPLITTINGS))
        raise _error(file, f"its tokenizer.ggml.pre is {short(name)}", f"one of {known}")
    return SPLITTINGS[name]


def _byte_level(file: GgufFile, words: list[str], kinds: list[int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitting = splitting_of(file)
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, _merges(file), ignore_merges=splitting.whole))
    if splitting.composed:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, words: list[str], kinds: list[int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = special_ids(file)
    numbers = {word: number for number, word in enumerate(words)}
    for number, word in enumerate(words):
        if len(word) > 1 and not word.strip(" ") and _SPACE * len(word) not in numbers:
            # Gemma's files spell runs of spaces as they are; other words have this sign for a space.
            words[number] = _SPACE * len(word)
            kinds[number] = _NORMAL
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = _merges(file) if "tokenizer.ggml.merges" in file else _merges_by_score(file, vocabulary, kinds)
    unknown = words[ids["unk"]] if "unk" in ids else None
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not file.get("tokenizer.ggml.add_space_prefix", file.get("tokenizer.ggml.model") == "llama"):
        backend.normalizer = spaces
    else:
        steps.append(decoders.Strip(" ", 1, 0))
        if "[INST]" in numbers and kinds[numbers["[INST]"]] == _CONTROL:
            # Mistral's later tokenizers put a space before the text only, others before each part of it.
            backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
        else:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    backend.decoder = decoders.Sequence(steps)
    return backend


_BUILDERS: dict[Any, Callable[[GgufFile, list[str], list[int]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece,
}


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    merges = file.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise _error(file, f"its tokenizer.ggml.merges is {short(merges)}", "a list of pairs")
    pairs = []
    for merge in merges:
        # A piece may itself begin with a space.
        first, _, second = merge[1:].partition(" ")
        pairs.append((merge[:1] + first, second))
    return pairs


def _merges_by_score(file: GgufFile, vocabulary: dict[str, int], kinds: list[int]) -> list[tuple[str, str]]:
    """Return the merges that pieces with scores imply, best first: a piece comes of every pair that spells it."""
    scores = file.get("tokenizer.ggml.scores")
    if file.architecture.startswith("gemma"):
        # Gemma's scores do not say in which order its pieces were merged; their order does.
        scores = [-number for number in range(len(vocabulary))]
    if not isinstance(scores, list) or len(scores) != len(vocabulary):
        raise _error(file, f"its tokenizer.ggml.scores is {short(scores)}", f"a list of {len(vocabulary)} numbers")
    pieces = {word: number for word, number in vocabulary.items() if kinds[number] == _NORMAL}
    merges = []
    for word in sorted(pieces, key=lambda word: -scores[pieces[word]]):
        pairs = [(word[:at], word[at:]) for at in range(1, len(word)) if word[:at] in pieces and word[at:] in pieces]
        merges += sorted(pairs, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    return merges


def _add_tokens(backend: Tokenizer, file: GgufFile, words: list[str], kinds: list[int], named: set[int]) -> None:
    """Add the tokens that are found whole in a text. named: ids of special tokens."""
    from tokenizers import AddedToken

    # Phi-3's tokens absorb spaces after them, except these.
    absorbing = file.architecture == "phi3" and file.get("tokenizer.ggml.model") == "llama"
    apart = ("<unk>", "<s>", "<|endoftext|>")
    # Some files give these another type.
    ends = {*_ENDS_OF_TURN, *_ENDS_OF_TEXT}
    tokens = []
    for number, (word, kind) in enumerate(zip(words, kinds, strict=True)):
        special = kind == _CONTROL or number in named or word in ends
        if special or kind == _USER_DEFINED:
            rstrip = absorbing and special and word not in apart
            tokens.append(AddedToken(word, normalized=False, special=special, rstrip=rstrip))
    backend.add_tokens(tokens)


def _add_ends(backend: Tokenizer, file: GgufFile, named: dict[str, str]) -> None:
    """Add the tokens that every prompt begins and ends with. named: special tokens."""
    from tokenizers import processors

    first = [named["bos"]] if "bos" in named and adds(file, "bos") else []
    last = [named["eos"]] if "eos" in named and adds(file, "eos") else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B:1", *last],
            special_tokens=[(word, backend.token_to_id(word)) for word in (*first, *last)],
        )


def _is_control(word: str, kind: int) -> bool:
    return kind != _NORMAL or (word[0] in "<[" and word[-1] in ">]")


def _words(file: GgufFile) -> list[str]:
    words = file.get("tokenizer.ggml.tokens")
    if not isinstance(words, list) or not words or not isinstance(words[0], str):
        raise _error(file, "it has no tokenizer.ggml.tokens", "a file with a vocabulary")
    # Files have words without letters in places that no text leads to.
    words = [word or f"[EMPTY_{number}]" for number, word in enumerate(words)]
    if len(set(words)) < len(words):
        seen: set[str] = set()
        again = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise _error(file, f"its vocabulary has {short(again)} twice", "words that differ")
    return words


def _kinds(file: GgufFile, count: int) -> list[int]:
    kinds = file.get("tokenizer.ggml.token_type", [_NORMAL] * count)
    if not isinstance(kinds, list) or len(kinds) != count:
        raise _error(file, f"its tokenizer.ggml.token_type is {short(kinds)}", f"a list of {count} types")
    return kinds


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    template = _template(file, "tokenizer.chat_template")
    names = file.get("tokenizer.chat_templates", [])
    if not isinstance(names, list):
        raise _error(file, f"its tokenizer.chat_templates is {short(names)}", "a list of names")
    found = {str(name): _template(file, f"tokenizer.chat_template.{name}") for name in names}
    named = {name: text for name, text in found.items() if text}
    if not named:
        return template or None
    return named if template is None else {"default": template, **named}


def _template(file: GgufFile, key: str) -> str | None:
    """Return the template of a key, or None. Raises ModelLoadError for another kind of value."""
    text = file.get(key)
    if text is None or isinstance(text, str):
        return text
    raise _error(file, f"its {key} is {short(text)}", "a text")


def _error(file: GgufFile, found: str, expected: str) -> ModelLoadError:
    return ModelLoadError(f"{file.path} cannot be loaded: {found}, expected {expected}")
