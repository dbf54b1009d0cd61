"""Images of requests: their files, decoded within limits, and what a composite model is given of them."""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import hashlib
import io
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from kvsieve.errors import InputError, KvsieveError, short
from kvsieve.hf.inputs import media_tokens
from kvsieve.hf.sieve import Sieve
from kvsieve.planning.turns import added_ids, render
from kvsieve.serve.failures import Failure
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.schema import ContentPart, ImageURL
from kvsieve.serve.ticket import BusyError, PromptImages, TooLargeError

if TYPE_CHECKING:
    from PIL import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA = re.compile(r"data:image/(?:png|jpe?g|webp|gif);base64,", re.IGNORECASE)
_NEGATIVE = np.int64(-(2**63))


@dataclass(frozen=True)
class ImageFile:
    """An image as it was sent.

    Attributes:
        data: the file's bytes.
        place: of its part in the request, such as messages.0.content.1.
    """

    data: bytes
    place: str


def image_file(part: ContentPart, place: str) -> ImageFile:
    """Return the file in a part of type image_url. Raises Failure for anything but a data URL of an image."""
    if not isinstance(part.image_url, ImageURL):
        raise _failure(f"{place}.image_url", 'expected an object {"url": "data:image/png;base64,..."}')
    url = part.image_url.url
    match = _DATA.match(url)
    if match is None:
        expected = "expected data:image/png;base64,... (or jpeg, webp, gif)"
        reason = "" if url[:5].lower() == "data:" else "; no address is fetched, so send the image itself"
        raise _failure(f"{place}.image_url.url", f"{expected}, got {short(url, 60)}{reason}")
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _failure(f"{place}.image_url.url", f"the image is no base64: {error}") from None
    return ImageFile(data, place)


class ImageReader:
    """Makes the inputs of a composite model from the images of requests, in any thread, one request at a time.

    Args:
        processor: of transformers, for the model.
        model: the model.
        tokenizer: renders chats; with the chat template.
        ids_of: returns the token ids of a rendered chat.
        limits: of requests.
    """

    def __init__(
        self, processor: Any, model: Any, tokenizer: Any, ids_of: Callable[[str], list[int]], limits: ServerLimits
    ) -> None:
        self._processor = copy.copy(processor)
        self._processor.tokenizer = _RenderedTokenizer(tokenizer, ids_of)
        self._media = sorted(media_tokens(model.config))
        self._mark = ""
        with contextlib.suppress(InputError):
            self._mark = render(tokenizer, [{"role": "user", "content": [{"type": "image"}]}])
        self._limits = limits
        self._settings = processor.image_processor.to_json_string().encode()
        self._lock = threading.Lock()
        self._memory = _Memory(limits.image_bytes)
        known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        named = {value for name, value in vars(processor).items() if name.endswith("_token") and isinstance(value, str)}
        # Marks of images that a text could spell: other ones are control tokens, which texts do not have.
        self._marks = sorted(named - known)

    def check_texts(self, texts: Sequence[str]) -> None:
        """Raise InputError for a text that spells a mark of an image."""
        for mark in self._marks:
            if any(mark in text for text in texts):
                raise InputError(f"messages: a text spells {mark!r}, which this model takes for an image; leave it out")

    def prompt(self, text: str, files: Sequence[ImageFile]) -> tuple[list[int], PromptImages]:
        """Return the token ids of a rendered chat, and its images.

        Raises:
            Failure: an image that cannot be read, or is too large.
            InputError: images that the model's processor refuses.
            BusyError: images of waiting requests take all memory for them.
        """
        with self._lock:
            left = self._limits.pixels
            opened = []
            for file in files:
                opened.append(_opened(file, left))
                left -= opened[-1].width * opened[-1].height
            ids, inputs = self._processed(text, opened)
            digests = self._digests(ids, files, opened)
        tokens = np.array(ids, dtype=np.int64)
        places = np.flatnonzero(np.isin(tokens, self._media))
        if not len(places):
            raise InputError("messages: the model's processor gives the images no tokens, so the model cannot see them")
        tokens[places] = digests
        end = int(places[-1]) + 1
        key = hashlib.sha256(tokens[:end].tobytes()).digest()
        images = PromptImages(inputs, tuple(tokens.tolist()), end, key)
        self._memory.hold(images)
        return ids, images

    def _processed(self, text: str, images: Sequence[Image.Image]) -> tuple[list[int], dict[str, Tensor]]:
        """Return the token ids of a text with images, and the model's other inputs."""
        try:
            found = dict(self._processor(text=[text], images=list(images), return_tensors="pt"))
        except KvsieveError:
            raise
        except Exception as error:  # processors check sizes and shapes in their own ways
            raise InputError(f"messages: the model's processor refuses the images: {error}") from error
        ids = found.pop("input_ids")[0].tolist()
        found.pop("attention_mask", None)
        return ids, {name: part for name, part in found.items() if isinstance(part, Tensor)}

    def _digests(self, ids: Sequence[int], files: Sequence[ImageFile], images: Sequence[Image.Image]) -> np.ndarray:
        """Return a negative number for each token of an image, int64 [M], drawn from the image's content."""
        total = int(np.isin(ids, self._media).sum())
        counts = [total]
        if len(files) > 1 and self._mark:
            counts = [int(np.isin(self._processed(self._mark, [image])[0], self._media).sum()) for image in images]
        contents = [file.data for file in files]
        if len(counts) != len(files) or sum(counts) != total:
            # Several images are processed otherwise than each alone, so that their tokens stand for all.
            counts = [total]
            contents = [b"".join(hashlib.sha256(data).digest() for data in contents)]
        drawn = [
            hashlib.shake_256(hashlib.sha256(self._settings).digest() + content).digest(8 * count)
            for content, count in zip(contents, counts, strict=True)
        ]
        return np.frombuffer(b"".join(drawn), dtype="<i8") | _NEGATIVE


def _opened(file: ImageFile, most: int) -> Image.Image:
    """Decode an image as transformers' own loader does, upright and in RGB; most: pixels that it may have."""
    from PIL import Image, ImageOps

    try:
        # Only its header is read here.
        image = Image.open(io.BytesIO(file.data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _failure(file.place, _too_many(most)) from None
    except Exception as error:
        reason = short(str(error), 200)
        raise _failure(file.place, f"the image cannot be read as PNG, JPEG, WebP or GIF: {reason}") from None
    if image.width * image.height > most:
        raise _failure(file.place, f"{_too_many(most)}; this one has {image.width} x {image.height}")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # decoders raise anything for a broken file
        raise _failure(file.place, f"the image is broken: {short(str(error), 200)}") from None


def _too_many(most: int) -> str:
    return f"the images of a request have too many pixels, {most:,} are left for this one; send smaller ones"


def _failure(place: str, message: str) -> Failure:
    return Failure(400, f"{place}: {message}", code="invalid_image", param=place)


class _RenderedTokenizer:
    """A tokenizer for a processor, which tokenizes rendered chats as the server does.

    It adds the tokens that the processor has it add, such as one for the beginning where the template writes none.
    """

    def __init__(self, tokenizer: Any, ids_of: Callable[[str], list[int]]) -> None:
        self._tokenizer = tokenizer
        self._ids_of = ids_of
        self._added = added_ids(tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, **options: Any
    ) -> dict[str, list[list[int]]]:
        first = self._tokenizer.bos_token
        rows = []
        for one in [text] if isinstance(text, str) else text:
            # As apply_chat_template of processors does.
            adds = add_special_tokens and not (first and one.startswith(first))
            before, after = self._added if adds else ([], [])
            rows.append([*before, *self._ids_of(one), *after])
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}


class _Memory:
    """Bytes of the inputs of all requests that wait or run."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        # Objects may be collected, and give their bytes back, anywhere.
        self._lock = threading.RLock()

    def hold(self, images: PromptImages) -> None:
        """Count images for as long as they exist. Raises BusyError or TooLargeError beyond the limit."""
        size = sum(part.numel() * part.element_size() for part in images.inputs.values())
        with self._lock:
            if size > self._most:
                raise TooLargeError(
                    f"the images take {size:,} bytes once processed, at most {self._most:,}; send fewer"
                )
            if self._held + size > self._most:
                raise BusyError("the images of other requests take all memory for images; try again later", 5)
            self._held += size
        weakref.finalize(images, self._give_back, size)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._held -= size


def tower_layers(sieve: Sieve) -> list[nn.Module]:
    """List the layers of a model's parts besides its decoder, such as those of a vision tower."""
    own = set(sieve.decoder.modules())
    lists = [part for part in sieve.model.modules() if isinstance(part, nn.ModuleList) and part not in own]
    return [layer for part in lists for layer in part]
