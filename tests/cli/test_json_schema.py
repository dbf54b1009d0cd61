"""`kvsieve run --json-schema`: answers that match a schema, of one prompt and of batches, with and without drafts."""

from __future__ import annotations

import json

import pytest

from tiny_models import build
from toy_bytes import byte_chats

SCHEMA = {"enum": ["one", "two"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a model of bytes, and a schema's file."""
    made = tmp_path_factory.mktemp("bytes")
    model = build("llama", vocab_size=288)
    model.save_pretrained(made)
    byte_chats().save_pretrained(made)
    (made / "schema.json").write_text(json.dumps(SCHEMA))
    (made / "prompts.txt").write_text("First\nThe second one\n")
    return made


def test_answers_match_the_schema(cli, folder):
    given = ("run", folder, "--json-schema", folder / "schema.json", "--max-new-tokens", 24)
    code, out, err = cli(
        *given, "--prompt", "Which?", "--compare", "full", "--draft", "lookup:ngram=1:adapt=false", "--json"
    )
    assert code == 0, err
    answers = [result["answer"] for result in json.loads(out)["results"]]
    code, out, err = cli(*given, "--prompts-file", folder / "prompts.txt", "--temperature", 1, "--seed", 1)
    assert code == 0, err
    answers += [json.loads(line)["answer"] for line in out.splitlines()]
    assert len(answers) == 4 and all(json.loads(answer) in SCHEMA["enum"] for answer in answers)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "a JSON schema is a dict")])
def test_a_file_without_a_schema_is_refused(cli, tmp_path, text, message):
    file = tmp_path / "bad.json"
    file.write_text(text)
    code, out, err = cli("run", "--prompt", "x", "--json-schema", file)
    assert code != 0 and out == "" and message in err
