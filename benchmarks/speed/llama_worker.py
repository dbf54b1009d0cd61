"""llama.cpp in a process of its own, for weights.py: prompts of token ids as JSON lines in, times as JSON lines out.

    python benchmarks/speed/llama_worker.py FILE.gguf --context 4160 --threads 2 --flash 1 --ubatch 512

The interpreter has llama-cpp-python or xllamacpp. llama-cpp-python compiles llama.cpp for the processor it is installed
on (`pip install --no-binary llama-cpp-python llama-cpp-python`). The wheel of xllamacpp on PyPI has one build for all
processors, which uses nothing above AVX2. The first line of output names the build and the instructions it uses.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from importlib.metadata import version
from typing import Any

# Logical batch of llama.cpp's default settings.
BATCH = 2048


class OwnLoop:
    """llama.cpp's C functions, called one pass at a time; the last token's largest logit is the next token."""

    package = "llama-cpp-python"

    def __init__(self, arguments: argparse.Namespace) -> None:
        import llama_cpp
        import numpy

        self.api = llama_cpp
        self.numpy = numpy
        # Kept here: C holds no reference to it.
        self.log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.log, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(arguments.file.encode(), options)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = arguments.context
        settings.n_batch = max(BATCH, arguments.ubatch)
        settings.n_ubatch = arguments.ubatch
        settings.n_threads = arguments.threads
        settings.n_threads_batch = arguments.threads
        settings.flash_attn_type = arguments.flash
        self.batch = settings.n_batch
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            sys.exit("error: llama.cpp made no context")
        self.words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def system(self) -> str:
        return str(self.api.llama_print_system_info().decode())

    def _passed(self, ids: list[int]) -> int:
        """Feed tokens, and return the next one."""
        for start in range(0, len(ids), self.batch):
            part = ids[start : start + self.batch]
            tokens = (self.api.llama_token * len(part))(*part)
            if code := self.api.llama_decode(self.context, self.api.llama_batch_get_one(tokens, len(part))):
                sys.exit(f"error: llama_decode returned {code}")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        return int(self.numpy.ctypeslib.as_array(logits, (self.words,)).argmax())

    def answer(self, ids: list[int], new_tokens: int) -> dict[str, Any]:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        start = time.perf_counter()
        tokens = [self._passed(ids)]
        first = time.perf_counter()
        while len(tokens) < new_tokens:
            tokens.append(self._passed(tokens[-1:]))
        end = time.perf_counter()
        size = self.api.llama_state_seq_get_size(self.context, 0)
        return {
            "ttft_s": first - start,
            "tpot_s": (end - first) / (new_tokens - 1),
            "kv_bytes": int(size),
            "tokens": tokens,
        }


class ItsServer:
    """llama.cpp's server within the process; times are those that it measures itself."""

    package = "xllamacpp"

    def __init__(self, arguments: argparse.Namespace) -> None:
        import xllamacpp

        self.api = xllamacpp
        settings = xllamacpp.CommonParams()
        settings.model.path = arguments.file
        settings.n_ctx = arguments.context
        settings.n_batch = max(BATCH, arguments.ubatch)
        settings.n_ubatch = arguments.ubatch
        settings.cpuparams.n_threads = arguments.threads
        settings.cpuparams_batch.n_threads = arguments.threads
        settings.flash_attn_type = list(xllamacpp.llama_flash_attn_type)[arguments.flash + 1]
        settings.n_parallel = 1
        settings.warmup = False
        # Prompts that are asked again are computed again.
        settings.cache_prompt = False
        settings.cache_ram_mib = 0
        settings.n_ctx_checkpoints = 0
        settings.verbosity = 0
        self.server = xllamacpp.Server(settings)

    def system(self) -> str:
        return str(self.api.get_system_info())

    def answer(self, ids: list[int], new_tokens: int) -> dict[str, Any]:
        request = {"prompt": ids, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        found = self.server.handle_completions(request)
        times = found["timings"]
        # The time of tokens begins when the first one is there.
        seconds = times["predicted_ms"] / 1000 / (times["predicted_n"] - 1)
        return {"ttft_s": times["prompt_ms"] / 1000, "tpot_s": seconds, "text": found["choices"][0]["text"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", help="GGUF file")
    parser.add_argument("--context", type=int, required=True, help="tokens of the KV cache, 16 bits a number")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--flash", type=int, choices=(0, 1), default=1, help="flash attention (default: 1)")
    parser.add_argument("--ubatch", type=int, default=512, help="tokens computed at a time (default: 512)")
    arguments = parser.parse_args()
    engine = (OwnLoop if importlib.util.find_spec("llama_cpp") else ItsServer)(arguments)
    hello = {"build": f"{engine.package} {version(engine.package)}", "system": engine.system()}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(engine.answer(request["ids"], request["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
