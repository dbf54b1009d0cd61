"""Processors and pictures for the tiny composite models: transformers' own classes over the toy tokenizer."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from typing import Any

import pytest
from PIL import Image
from transformers import LlavaProcessor, ProcessorMixin

from toy_chats import ASK, ROLES
from toy_words import word_tokenizer

IMAGE = 120
# The marks that templates write for an image.
LLAVA = {IMAGE: "<image>"}
QWEN = {IMAGE: "<|image_pad|>", 122: "<|vision_start|>", 123: "<|vision_end|>"}


def template(mark: str) -> str:
    """A chat whose contents are texts, or parts with images."""
    part = f"{{% if p.type == 'image' %}}{mark} {{% else %}}{{{{ p.text }}}} {{% endif %}}"
    parts = f"{{% for p in m.content %}}{part}{{% endfor %}}"
    content = f"{{% if m.content is string %}}{{{{ m.content }}}} {{% else %}}{parts}{{% endif %}}"
    return f"{ROLES}{{% for m in messages %}}{{{{ names[m.role] }}}} {content}[EOS] {{% endfor %}}{ASK}"


class ToyQwenProcessor(ProcessorMixin):
    """Qwen's processor without its part for videos, which needs torchvision."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **more):
        self.image_token = QWEN[IMAGE]
        self.image_token_id = IMAGE
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **more: Any) -> str:
        merged = self.image_processor.merge_size**2
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // merged)


def processor(name: str) -> Any:
    """The processor of a tiny model: llava, or one of Qwen's families."""
    if name == "llava":
        clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
        chat = template("<image>")
        tokenizer = word_tokenizer(chat, LLAVA)
        images = clip.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        return LlavaProcessor(images, tokenizer, 8, "default", chat, "<image>", 1)
    qwen = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    images = qwen.Qwen2VLImageProcessorPil(size=size, patch_size=8, temporal_patch_size=2, merge_size=2)
    chat = template("<|vision_start|><|image_pad|><|vision_end|>")
    return ToyQwenProcessor(images, word_tokenizer(chat, QWEN), chat_template=chat)


def picture(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    """An image whose pixels depend on a number."""
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


def file_of(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes | Image.Image, kind: str = "png", **more: Any) -> dict[str, Any]:
    """A part of a message with an image."""
    data = data if isinstance(data, bytes) else file_of(data)
    return {"type": "image_url", "image_url": {"url": data_url(data, kind), **more}}


def bomb(width: int, height: int) -> bytes:
    """A PNG file of a few bytes that would be decoded to very many."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
