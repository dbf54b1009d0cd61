"""Images in chats: the same answers as the library's, prefixes found by content, and every refusal."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc

import httpx
import openai
import pytest
import torch

import kvsieve
from kvsieve.errors import InputError
from kvsieve.serve import reading
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.schema import ChatRequest
from kvsieve.serve.ticket import BusyError, TooLargeError
from served_apps import listening
from tiny_models import build
from toy_images import IMAGE, LLAVA, bomb, data_url, file_of, part, picture, processor

CHUNK = 8
SNAPKV = "snapkv:window=4:paper=True"
LIMITS = ServerLimits(chunk=CHUNK, max_tokens=16, images=3, pixels=100_000, image_bytes=1 << 20)
TEXT = "w5 w6 w7 w8 w9"


class Served:
    """A live server of a tiny composite model, and the model as the library runs it."""

    def __init__(self, name: str, app, url: str) -> None:
        self.name = name
        self.processor = processor(name)
        self.lone = build(name)
        self.app = app
        self.url = url

    def post(self, *messages, **body):
        body = {"model": "tiny", "messages": list(messages), "max_tokens": 6, "ignore_eos": True, **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def ask(self, *messages, **body):
        """The answer's text, and what it cost."""
        reply = self.post(*messages, **body)
        assert reply.status_code == 200, reply.text
        reply = reply.json()
        return reply["choices"][0]["message"]["content"], reply["usage"]

    def inputs(self, *chat):
        return self.processor.apply_chat_template(
            list(chat), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )

    def own(self, *chat, plan=None, **how):
        """The library's answer to a chat in transformers' form, and its prompt."""
        given = dict(self.inputs(*chat))
        ids, mask = given.pop("input_ids"), given.pop("attention_mask")
        config = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        # Of a text, whose tokens need no kinds.
        given = {} if IMAGE not in ids else given
        with kvsieve.attach(self.lone, plan or kvsieve.plan("full")) as sieve:
            result = sieve.generate(ids, mask, **given, **config, **how)
        answer = self.processor.tokenizer.decode(result.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        return answer, ids[0].tolist()


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "qwen3_vl"])
def served(request):
    name = request.param
    options = ServerOptions(others=("full", SNAPKV, "gemfilter", "kvzip", "xattention"), limits=LIMITS)
    model, reader = build(name), processor(name)
    with application(model, reader.tokenizer, options, "tiny", reader) as app, listening(app) as url:
        yield Served(name, app, url)


@pytest.fixture(scope="module")
def llava():
    options = ServerOptions(limits=LIMITS)
    reader = processor("llava")
    with application(build("llava"), reader.tokenizer, options, "tiny", reader) as app, listening(app) as url:
        yield Served("llava", app, url)


def user(*parts):
    """A user's message, as a client sends it and as transformers takes it."""
    sent = [{"type": "text", "text": each} if isinstance(each, str) else part(each) for each in parts]
    own = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each} for each in parts
    ]
    return {"role": "user", "content": sent}, {"role": "user", "content": own}


def test_answers_are_the_librarys(served):
    """Prompts are read in chunks whose borders lie in images, in joint passes with text."""
    sent, own = user(TEXT, picture(1), "w11 w12", picture(2, 48, 32), TEXT)
    answer, ids = served.own(own)
    assert ids.count(IMAGE) > 2 * CHUNK or served.name != "llava"
    order = served.app.state.service.preparer.chat(ChatRequest(model="tiny", messages=[sent]), "")
    assert list(order.ids) == ids
    text = {"role": "user", "content": "w1 w2 w3 w4"}
    alone, _ = served.ask(text)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [pool.submit(served.ask, message) for message in (sent, text, sent)]
        (first, usage), (other, _), (again, _) = (each.result() for each in found)
    assert first == again == answer and other == alone
    assert usage["prompt_tokens"] == len(ids)
    evicting, _ = served.own(own, plan=kvsieve.plan("snapkv", budget=24, window=4, paper=True))
    kept, usage = served.ask(sent, kv={"method": SNAPKV, "budget": 24})
    assert kept == evicting and usage["kv"]["applied"] and usage["kv"]["entries"] == 24


def test_streams_and_several_answers_are_the_same(served):
    sent, _ = user(picture(3), TEXT)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        more = {"model": "tiny", "messages": [sent], "max_tokens": 6, "extra_body": {"ignore_eos": True}}
        whole = client.chat.completions.create(n=2, **more)
        stream = [each.choices[0].delta.content or "" for each in client.chat.completions.create(stream=True, **more)]
    texts = {choice.message.content for choice in whole.choices}
    assert texts == {"".join(stream)}


def test_prefixes_are_found_by_the_content_of_images(served, monkeypatch):
    """The same image is found, another one with as many tokens is not; a later turn runs no vision tower."""
    embedded = []
    embed = reading.embed_prompt
    monkeypatch.setattr(reading, "embed_prompt", lambda *given: embedded.append(1) or embed(*given))
    pad = "w20 w21 w22 w23 " * 8
    first, own = user(pad, picture(11), TEXT)
    other, own_other = user(pad, picture(12), TEXT)
    answer, ids = served.own(own)
    begin, end = ids.index(IMAGE), len(ids) - ids[::-1].index(IMAGE)
    text, usage = served.ask(first)
    assert text == answer and usage["prompt_tokens_details"]["cached_tokens"] <= 1
    text, usage = served.ask(first)
    assert text == answer and usage["prompt_tokens_details"]["cached_tokens"] > end
    assert len(embedded) == 1
    text, usage = served.ask(other)
    assert text == served.own(own_other)[0]
    assert 1 < usage["prompt_tokens_details"]["cached_tokens"] <= begin
    assert len(embedded) == 2
    # Another image in a later turn: the first one is found.
    said, again = {"role": "assistant", "content": "w30 w31"}, user("w32", picture(13), "w33 w34")
    own_said = {"role": "assistant", "content": [{"type": "text", "text": "w30 w31"}]}
    text, usage = served.ask(first, said, {"role": "user", "content": "w35 w36"})
    own_text = {"role": "user", "content": [{"type": "text", "text": "w35 w36"}]}
    assert text == served.own(own, own_said, own_text)[0] and len(embedded) == 2
    assert usage["prompt_tokens_details"]["cached_tokens"] > end
    text, usage = served.ask(first, said, again[0])
    assert text == served.own(own, own_said, again[1])[0] and len(embedded) == 3
    assert usage["prompt_tokens_details"]["cached_tokens"] > end


def test_a_prefix_before_an_image_serves_text(served):
    """Positions after images are not those of texts."""
    pad = "w40 w41 w42 w43 " * 12
    first, _ = user(pad, picture(14), TEXT)
    plain = {"role": "user", "content": [{"type": "text", "text": pad}, {"type": "text", "text": TEXT}]}
    for method in ("full", "xattention"):
        kv = {"method": method}
        served.ask(first, kv=kv)
        text, usage = served.ask(plain, kv=kv)
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert text == served.own(plain, plan=kvsieve.plan(method), chunk=CHUNK)[0]


def test_sessions_go_on_after_images(served):
    sent, own = user("w50 w51 w52", picture(15), TEXT)
    kv = {"session": f"s-{served.name}"}
    first, _ = served.ask(sent, kv=kv)
    assert first == served.own(own)[0]
    said = {"role": "assistant", "content": first}
    text, usage = served.ask(sent, said, {"role": "user", "content": "w53 w54"}, kv=kv)
    own_said = {"role": "assistant", "content": [{"type": "text", "text": first}]}
    again = {"role": "user", "content": [{"type": "text", "text": "w53 w54"}]}
    assert text == served.own(own, own_said, again)[0]
    assert usage["prompt_tokens_details"]["cached_tokens"] > len(served.own(own)[1]) - 2


@pytest.mark.parametrize(
    ("given", "place", "told"),
    [
        ({"image_url": {"url": "https://example.org/a.png"}}, "image_url.url", "no address is fetched"),
        ({"image_url": {"url": "file:///etc/passwd"}}, "image_url.url", "no address is fetched"),
        ({"image_url": {"url": "data:application/pdf;base64,AAAA"}}, "image_url.url", "expected data:image/png;base64"),
        ({"image_url": {"url": data_url(b"x" * 9)[:-2]}}, "image_url.url", "no base64"),
        ({"image_url": "data:image/png;base64,AAAA"}, "image_url", "expected an object"),
        ({}, "image_url", "expected an object"),
        ({"image_url": {"url": "data:,", "detail": "original"}}, "image_url.url", "expected data:image/png;base64"),
        (part(b"no image at all"), "", "cannot be read as PNG"),
        (part(file_of(picture(1), "BMP")), "", "cannot be read as PNG"),
        (part(file_of(picture(1))[:-400]), "", "is broken"),
        (part(bomb(30_000, 30_000)), "", "too many pixels"),
        (part(bomb(11_000, 11_000)), "", "too many pixels"),
        (part(bomb(500, 300)), "", "500 x 300"),
        (part(bomb(300, 300)), "", "is broken"),
    ],
)
def test_images_that_cannot_be_read_are_refused_at_their_place(llava, given, place, told):
    broken = {**given, "type": "image_url"}
    reply = llava.post(
        {"role": "user", "content": "w1"}, {"role": "user", "content": [{"type": "text", "text": "w2"}, broken]}
    )
    error = reply.json()["error"]
    where = "messages.1.content.1" + f".{place}" * bool(place)
    assert reply.status_code == 400 and told in error["message"], error
    assert error["param"] == where and error["message"].startswith(where) and len(error["message"]) < 400


def test_every_format_is_read(llava):
    image = picture(4)
    answers = set()
    for kind, how in (
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("GIF", {"save_all": True, "append_images": [picture(5)]}),
    ):
        data = file_of(image.quantize(64) if kind == "GIF" else image, kind, **how)
        sent = {"role": "user", "content": [part(data, kind.lower(), detail="low"), {"type": "text", "text": "w1"}]}
        answers.add(llava.ask(sent)[0])
    assert len(answers) <= 2
    jpeg = {"role": "user", "content": [part(file_of(image, "JPEG"), "jpeg")]}
    assert llava.ask(jpeg)[1]["prompt_tokens"] == llava.inputs(user(image)[1])["input_ids"].shape[1]


def test_requests_with_images_are_bounded(llava):
    def refused(*parts, **body):
        reply = llava.post(user(*parts)[0], **body)
        assert reply.status_code == 400
        return reply.json()["error"]["message"]

    assert "at most 3 images" in refused(*[picture(1)] * 4)
    # Together, not each.
    assert "19,000 are left" in refused(*[picture(1, 270, 150)] * 3)
    assert "protect and question count tokens of texts" in refused(picture(1), "w1", kv={"question": True})
    reply = llava.post({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]})
    assert "an image is a part of type 'image_url' here" in reply.json()["error"]["message"]


def test_plans_that_read_a_prompt_in_their_own_steps_are_refused(served):
    for method in ("gemfilter", "kvzip"):
        reply = served.post(user(picture(1), TEXT)[0], kv={"method": method})
        error = reply.json()["error"]
        assert reply.status_code == 400 and "in steps of its own" in error["message"] and error["param"] == "kv.method"


def test_a_mark_that_a_user_spells_is_text(llava):
    sent, _ = user(f"w1 {LLAVA[IMAGE]} w2", picture(6))
    tokens = llava.inputs(user("w1", picture(6))[1])["input_ids"][0].tolist().count(IMAGE)
    order = llava.app.state.service.preparer.chat(ChatRequest(model="tiny", messages=[sent]), "")
    assert order.ids.count(IMAGE) == tokens
    assert llava.ask(sent)[1]["prompt_tokens"] == len(order.ids)


def test_tokens_of_a_completion_bring_no_image(llava):
    body = {"model": "tiny", "prompt": [5, IMAGE, 6], "max_tokens": 2}
    reply = httpx.post(f"{llava.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400 and "images or the like" in reply.json()["error"]["message"]


def test_the_memory_of_images_is_bounded_and_given_back():
    limits = ServerLimits(image_bytes=20_000)
    reader = processor("llava")
    with application(build("llava"), reader.tokenizer, ServerOptions(limits=limits), "tiny", reader) as app:
        preparer = app.state.service.preparer

        def order(*images):
            return preparer.chat(ChatRequest(model="tiny", messages=[user(*images)[0]]), "")

        # 3 x 32 x 32 numbers of four bytes each.
        with pytest.raises(TooLargeError, match="24,576 bytes"):
            order(picture(1), picture(2))
        held = order(picture(1))
        with pytest.raises(BusyError, match="images of other requests"):
            order(picture(2))
        del held
        gc.collect()
        order(picture(2))


def test_equal_prefixes_have_equal_images(llava):
    """Numbers in place of an image's tokens are negative, and those of its file."""

    def known(*parts):
        order = llava.app.state.service.preparer.chat(ChatRequest(model="tiny", messages=[user(*parts)[0]]), "")
        return order.known_ids, order.ids

    one, ids = known("w1", picture(1), "w2")
    two, _ = known("w1", picture(1), "w2", picture(2))
    other, _ = known("w1", picture(2), "w2")
    at = ids.index(IMAGE)
    places = [place for place, token in enumerate(ids) if token == IMAGE]
    assert all(one[place] < 0 for place in places) and len({one[place] for place in places}) == len(places)
    assert two[: places[-1] + 2] == one[: places[-1] + 2]
    assert other[:at] == one[:at] and not {other[place] for place in places} & {one[place] for place in places}
    assert [token for token in one if token >= 0] == [token for token in ids if token != IMAGE]


def test_a_template_without_images_is_refused():
    reader = processor("llava")
    reader.chat_template = None
    reader.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}"
    )
    with application(build("llava"), reader.tokenizer, ServerOptions(), "tiny", reader) as app:
        with pytest.raises(InputError, match="the model's processor refuses the images"):
            app.state.service.preparer.chat(ChatRequest(model="tiny", messages=[user(picture(1), "w1")[0]]), "")


def test_a_checkpoint_is_loaded_with_its_processor(tmp_path, capsys):
    from kvsieve.cli.loading import load_processor

    reader = processor("llava")
    model = build("llava")
    model.save_pretrained(tmp_path)
    reader.save_pretrained(tmp_path)
    found = kvsieve.models.load_processor(str(tmp_path))
    assert type(found) is type(reader) and found.image_token == LLAVA[IMAGE]
    loaded, tokenizer = kvsieve.models.load(str(tmp_path), torch.float32, "cpu", images=True)
    assert type(loaded) is type(model) and tokenizer.convert_tokens_to_ids(LLAVA[IMAGE]) == IMAGE
    for name in ("preprocessor_config.json", "processor_config.json"):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / name).unlink()
    assert load_processor(str(tmp_path), None) is None
    assert "images are refused" in capsys.readouterr().err
    (tmp_path / "text").mkdir()
    build("llama").save_pretrained(tmp_path / "text")
    assert kvsieve.models.load_processor(str(tmp_path / "text")) is None
