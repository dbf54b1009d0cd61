"""`kvsieve run --documents`: files that are prefilled alone, joined, and asked about."""

from __future__ import annotations

import json

import pytest
import torch

import kvsieve
from kvsieve.cli.documents import document_texts
from kvsieve.cli.joined import given_documents
from kvsieve.planning.documents import document_prompt
from kvsieve.planning.turns import prompt_ids
from tiny_models import build
from toy_chats import chat_tokenizer, template
from toy_words import word_tokenizer

OPTIONS = ["--question", "w1 w2", "--max-new-tokens", "6", "--dtype", "float32", "--method", "full"]


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{(start + 7 * i) % 80}" for i in range(count))


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def files(tmp_path):
    """Three documents of 60, 50 and 40 words, each after a name that is one word."""
    found = []
    for number, count in enumerate((60, 50, 40)):
        file = tmp_path / f"w{number}"
        file.write_text(words(count, number) + "\n")
        found.append(str(file))
    return found


def result_of(cli, folder, *options):
    code, out, err = cli("run", folder, *OPTIONS, *options, "--json")
    assert code == 0, err
    return json.loads(out)["results"][-1]


@pytest.mark.parametrize("kind", ["modules", "link:tokens=8", "prophet", "relevant:documents=1", "full"])
def test_documents_are_joined_as_the_library_joins_them(cli, chat_dir, files, kind):
    found = result_of(cli, chat_dir, "--documents", ",".join(files), "--join", kind, "--system", "w9")
    model, tokenizer = kvsieve.models.load(chat_dir, "checkpoint")
    messages = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w1 w2"}]
    prompt = document_prompt(tokenizer, messages, document_texts(files))
    ids = torch.tensor([prompt.ids])
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        how = {"kind": kind, "question": prompt.question, "chunk": 1024}
        joined = sieve.join(prompt.documents, prompt.before, **how)
        result = sieve.generate(ids, cache=joined.cache, chunk=1024, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert found["tokens"] == result.sequences[0, ids.shape[1] :].tolist()
    join = found["join"]
    assert (join["documents"], join["tokens"], join["kind"]) == (3, joined.ids.shape[1], joined.kind)
    assert (join["found"], join["prefilled"], join["reread"]) == (0, joined.prefilled, joined.reread)
    edited = found["stats"]["edited"]
    if kind == "full":
        assert edited is None
    else:
        # Both later documents, after their names, less the tokens prefilled again.
        assert edited["share"] == round((92 - joined.reread) / ids.shape[1], 4) and edited["rules"] == [joined.kind]
        assert (edited["reused"], edited["reread"]) == (joined.reused, joined.reread)


def test_a_full_join_answers_as_one_prompt(cli, chat_dir, files, tmp_path):
    whole = tmp_path / "whole"
    whole.write_text("\n\n".join(document_texts(files)))
    joined = result_of(cli, chat_dir, "--documents", ",".join(files), "--join", "full")
    code, out, _ = cli("run", chat_dir, "--prompt-file", whole, *OPTIONS, "--json")
    assert code == 0 and json.loads(out)["results"][0]["answer"] == joined["answer"]


def test_documents_come_from_the_store_in_any_order(cli, chat_dir, files, tmp_path):
    store = ["--store", str(tmp_path / "store")]
    first = result_of(cli, chat_dir, "--documents", ",".join(files), *store)
    options = [word for name in (files[2], files[0]) for word in ("--documents", name)]
    again, fresh = (result_of(cli, chat_dir, *options, *more) for more in (store, []))
    assert first["join"]["found"] == 0 and again["join"]["found"] > 80 and fresh["join"]["found"] == 0
    assert again["answer"] == fresh["answer"]
    assert any("tokens came from the store" in note for note in again["stats"]["notes"])


@pytest.mark.parametrize("method", ["snapkv:budget=40:window=8", "keydiff:budget=50%", "full:codec=int8"])
def test_methods_are_compared_on_joined_documents(cli, chat_dir, files, method):
    name, _, codec = method.partition(":codec=")
    more = ["--codec", codec] if codec else []
    options = [*OPTIONS[:-1], name, "--compare", "full", *more]
    code, out, err = cli("run", chat_dir, "--documents", ",".join(files), *options)
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("join: ")]
    assert len(lines) == 2 and all(
        "link:tokens=32:shift=true, 3 documents, 154 tokens: 0 from the store, 153 prefilled" in line for line in lines
    )
    assert all(" s; " in line and line.endswith("approximate") for line in lines) and "edited:" not in out


def test_without_a_method_documents_get_one_that_joins_take(cli, chat_dir, files):
    options = [chat_dir, *OPTIONS[:-2], "--budget", "40", "--json"]
    for given, name in ((["--documents", ",".join(files)], "snapkv"), (["--prompt-file", files[0]], "fastkv")):
        code, out, err = cli("run", *options, *given)
        assert code == 0, err
        assert json.loads(out)["results"][0]["label"] == f"{name}:budget=40"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--documents", "FILE"], "--documents needs a question"),
        (["--documents", "FILE,", "--question", "w1"], "a comma without a file"),
        (["--documents", "-,-", "--question", "w1"], "names stdin (-) more than once"),
        (["--documents", "FILE", "--question", "w1", "--prompt", "w2"], "got --prompt and --documents"),
        (["--documents", "FILE", "--question", "w1", "--protect", "0:4"], "--documents goes without --protect"),
        (["--documents", "FILE", "--question", "w1", "--memory", "2GiB"], "--documents goes without --memory"),
        (["--documents", "FILE", "--question", "w1", "--join", "links"], "did you mean 'link'?"),
        (["--documents", "FILE", "--question", "w1", "--join", "link:token=3"], "did you mean 'tokens'?"),
        (["--prompt", "w1", "--join", "link"], "--join needs the documents"),
        (["--documents", "FILE,none.txt", "--question", "w1"], "cannot read the document 'none.txt': No such file"),
        (["--documents", "EMPTY", "--question", "w1"], "the document is empty"),
        (["--documents", "FILE,BINARY", "--question", "w1"], "is not UTF-8 text"),
    ],
)
def test_bad_documents_fail_before_a_model_is_loaded(cli, monkeypatch, tmp_path, options, told):
    monkeypatch.setattr(kvsieve.models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    contents = {"FILE": b"w1", "EMPTY": b" \n", "BINARY": b"\xff\x00"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("run", *options)
    assert code == 2 and told in err and err.count("error:") == 1 and out == ""


def test_a_name_may_have_a_comma(tmp_path):
    for name in ("a,b.txt", "c.txt", "d.txt"):
        (tmp_path / name).write_text("w1")
    given = [str(tmp_path / "a,b.txt"), f"{tmp_path / 'c.txt'}, {tmp_path / 'd.txt'}"]
    assert given_documents(given, "w2", {}) == ["a,b.txt\n\nw1", "c.txt\n\nw1", "d.txt\n\nw1"]


def test_documents_beyond_the_context_are_refused(cli, chat_dir, tmp_path):
    file = tmp_path / "w5"
    file.write_text(words(300))
    code, _, err = cli("run", chat_dir, *OPTIONS, "--documents", f"{file},{file}")
    assert code == 2 and "the documents have 603 tokens together" in err


@pytest.mark.parametrize("chat", [True, False])
def test_parts_of_a_prompt_with_documents_are_those_of_the_whole(chat):
    tokenizer = chat_tokenizer() if chat else word_tokenizer()
    messages = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w1 w2"}]
    parts = document_prompt(tokenizer, messages, [" w3 w4\n", "w5"])
    whole = [messages[0], {"role": "user", "content": "w3 w4\n\nw5\n\nw1 w2"}]
    assert parts.ids == prompt_ids(tokenizer, whole)
    assert [tokenizer.decode(one).strip() for one in parts.documents] == ["w3 w4", "w5"]
    assert tokenizer.decode(parts.question).startswith("w1 w2")


def test_control_tokens_in_documents_are_text():
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "w1"}]
    ends = [
        document_prompt(tokenizer, messages, ["w3 [EOS] w4"], parse_special=special).documents[0].count(127)
        for special in (False, True)
    ]
    assert ends == [0, 1]


def test_a_template_that_changes_the_text_is_refused():
    tokenizer = word_tokenizer(template(text="m.content | upper"))
    with pytest.raises(kvsieve.KvsieveError, match="changes the beginning of a message"):
        document_prompt(tokenizer, [{"role": "user", "content": "w1"}], ["w2"])
