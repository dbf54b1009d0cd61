"""Environment variables of whoever runs the tests: none changes what is printed or computed."""

from __future__ import annotations

import os

# Where the demo model and a browser are, and what runs at all, is theirs to say.
THEIRS = (
    "KVSIEVE_CACHE",
    "KVSIEVE_DEMO_GGUF",
    "KVSIEVE_REQUIRE_BROWSER",
    "KVSIEVE_KERNELS",
    "KVSIEVE_VLLM_ANY_VERSION",
)
# Ways of printing, and a compiler that is none for kernels.
DROPPED = "LINES TERMINAL_WIDTH NO_COLOR FORCE_COLOR CLICOLOR_FORCE PY_COLORS GITHUB_ACTIONS CC".split()


def settle() -> None:
    """Give this process, and those that it starts, the settings that tests are written for."""
    for name in [*os.environ]:
        if name in DROPPED or (name.startswith("KVSIEVE_") and name not in THEIRS):
            del os.environ[name]
    os.environ |= {"COLUMNS": "80", "TERM": "xterm"}
    # Profiles change what methods do, and a busy machine what is measured.
    os.environ |= {"KVSIEVE_HOME": os.devnull, "KVSIEVE_ATTENTION": "table"}
