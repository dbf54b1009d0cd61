"""The server under a certificate: pairs of files that are none are refused, and clients speak to it as over HTTP."""

from __future__ import annotations

import shutil
import ssl
import subprocess

import httpx
import pytest

from forked import forked
from kvsieve.cli.main import run_cli
from kvsieve.errors import InputError
from kvsieve.lab.client import ServerClient, ServerError
from kvsieve.serve import run
from kvsieve.serve.tls import read_pair
from tiny_models import build
from toy_chats import chat_tokenizer

NAME = "llm.example.org"


def made(folder, *more: str) -> tuple[str, str]:
    """A certificate of this machine that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl is installed")
    pair = str(folder / "certificate.pem"), str(folder / "key.pem")
    names = f"subjectAltName=DNS:localhost,DNS:{NAME},IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "3650"]
    command += ["-subj", "/CN=localhost", "-addext", names, "-out", pair[0], "-keyout", pair[1]]
    subprocess.run([*command, *(more or ("-nodes",))], check=True, capture_output=True)
    return pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return made(tmp_path_factory.mktemp("pair"))


def test_a_pair_is_taken_and_nothing_is_plain_http(pair):
    assert read_pair(*pair) == pair and read_pair(None, None) is None


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        (True, None, "go together"),
        (None, True, "go together"),
        ("absent.pem", True, "--tls-cert .*cannot be read: No such file"),
        (True, "absent.pem", "--tls-key .*cannot be read: No such file"),
        (b"no certificate", True, "--tls-cert .*no certificate in PEM"),
        (True, b"no key", "--tls-key .*expected a private key in PEM"),
    ],
)
def test_files_that_are_no_pair_are_refused(pair, tmp_path, certificate, key, words):
    def file(given, own, name):
        if isinstance(given, bytes):
            (tmp_path / name).write_bytes(given)
            return str(tmp_path / name)
        return own if given is True else given

    with pytest.raises(InputError, match=words):
        read_pair(file(certificate, pair[0], "certificate.pem"), file(key, pair[1], "key.pem"))


def test_another_key_is_refused_and_so_is_one_under_a_passphrase(pair, tmp_path):
    with pytest.raises(InputError, match="is not the key of the certificate"):
        read_pair(pair[0], made(tmp_path)[1])
    with pytest.raises(InputError, match="is encrypted"):
        read_pair(*made(tmp_path, "-passout", "pass:secret"))


def test_the_command_refuses_half_a_pair_before_it_loads_a_model(pair, capsys):
    with pytest.raises(SystemExit) as ended:
        run_cli(["serve", "none.gguf", "--tls-cert", pair[0]])
    assert ended.value.code == 2 and "--tls-key" in capsys.readouterr().err


def serve(tell, pair):
    run.serve(build("llama"), chat_tokenizer(), run.ServerOptions(port=0, tls=pair, hosts=(NAME,)), "tiny", tell)


def test_clients_speak_to_a_server_under_a_certificate(pair, monkeypatch):
    with forked(serve, pair) as (_, heard):
        url = heard.recv().split(" at ")[1].split(";")[0]
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=pair[0])
        with httpx.Client(base_url=url, verify=context, timeout=60) as client:
            assert client.get("/health").json() == {"status": "ok"}
            assert client.get("/health", headers={"Host": NAME}).status_code == 200
            assert client.get("/health", headers={"Host": "elsewhere.example"}).status_code == 400
            assert "<title>" in client.get("/").text
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as reply:
                assert [line for line in reply.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"), timeout=60)
        with pytest.raises(ServerError, match="(?i)certificate"):
            ServerClient(url)
        monkeypatch.setenv("SSL_CERT_FILE", pair[0])
        asked = ServerClient(url)
        assert asked.model == "tiny" and asked.complete([5, 6, 7], 3, ignore_eos=True).new_tokens == 3
        asked.close()
