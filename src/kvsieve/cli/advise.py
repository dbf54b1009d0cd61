"""`kvsieve advise`: which plan suits a model, a context and a limit, by measuring a handful of them."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsieve.cli.calibrate import duration
from kvsieve.cli.estimate import parse_contexts
from kvsieve.cli.evaluate import budgets_of, progress_bar
from kvsieve.cli.loading import DeviceOption, DtypeOption, check_device, check_dtype, load_model
from kvsieve.cli.output import JsonOption, emit_json, print_table, say, show
from kvsieve.cli.specs import (
    PARTS,
    CodecsOption,
    PrefillsOption,
    RestsOption,
    method_specs,
    parse_codecs,
    parse_prefills,
    parse_rests,
    spec,
)
from kvsieve.errors import InputError

if TYPE_CHECKING:
    from kvsieve.advise import Advice
    from kvsieve.advise.choose import Candidate

_METHODS = "snapkv,adakv,fastkv,asl,lagkv,rocketkv,rocketkv-mt,streamingllm"
_TPOT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s)", re.IGNORECASE)


def advise_command(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory of a checkpoint or .gguf file; the demo model if left out.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of your prompts: 7500, 16k.")] = "8k",
    memory: Annotated[str | None, typer.Option(help="Limit on the KV cache of one prompt: 2GiB, 300MB.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Limit on the time per token: 50ms, 0.1s.")] = None,
    loss: Annotated[
        float | None, typer.Option(help="Limit on the KL to full KV, nats per token; 0.02 if no limit is given.")
    ] = None,
    task: Annotated[
        Path | None,
        typer.Option(help="A text to read, in windows, or .jsonl rows of context, question and answer."),
    ] = None,
    methods: Annotated[str, typer.Option(help="What to measure, with parameters: snapkv:kernel=21,kvzip.")] = _METHODS,
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    budgets: Annotated[str, typer.Option(help="Of each method; a few shares, or what fits, if left out.")] = "",
    samples: Annotated[int, typer.Option(help="Prompts per task, once to choose by and once held back.")] = 3,
    measure_at: Annotated[
        str | None, typer.Option(help="Tokens of the prompts that are measured; what takes bearable time if left out.")
    ] = None,
    question: Annotated[str, typer.Option(help="Do methods see the question? visible or hidden.")] = "visible",
    cost_samples: Annotated[int, typer.Option(help="Runs per plan that are timed; 0 leaves times out.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the generated prompts.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw loss against memory and time into this PNG file.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend a plan for a context and a limit on memory, time or loss, from measurements on the model."""
    check_dtype(dtype)

    from kvsieve.advise import AdviceOptions, PlanLimits, advise, built_in, from_file
    from kvsieve.budget import parse_bytes
    from kvsieve.models.fetch import MODEL_NAME

    options = AdviceOptions(
        context=_tokens(context, "--context"),
        limits=PlanLimits(
            memory=None if memory is None else parse_bytes(memory),
            tpot=None if tpot is None else _seconds(tpot),
            loss=loss,
        ),
        methods=tuple(method_specs(methods)),
        codecs=tuple(parse_codecs(codec)),
        rests=tuple(parse_rests(rest)),
        prefills=tuple(parse_prefills(prefill)),
        budgets=tuple(budgets_of(budgets)),
        samples=samples,
        measure_at=None if measure_at is None else _tokens(measure_at, "--measure-at"),
        question=question,
        cost_samples=cost_samples,
        seed=seed,
    )
    material = built_in() if task is None else from_file(task)
    plot = None if plot is None else _picture_file(plot)
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device)
    with progress_bar() as progress:
        found = advise(
            loaded,
            tokenizer,
            options,
            material,
            name=model or MODEL_NAME,
            progress=progress,
            announce=partial(_announce, options.context),
        )
    if plot is not None:
        from kvsieve.advise.plot import frontier_png

        plot.write_bytes(frontier_png(found))
    if as_json:
        emit_json(found.to_dict())
    else:
        print_advice(found, model)
        if plot is not None:
            show(f"the picture is in {plot}")
    if found.choice is None:
        raise typer.Exit(1)


def print_advice(advice: Advice, model: str | None) -> None:
    """Print the table, the recommendation and what stands behind it."""
    from kvsieve.advise.choose import on_frontier

    rows = [_row(each, on_frontier(each, advice.candidates)) for each in advice.candidates]
    headers = ["", "plan", "KV", "loss", "top-1", "score", "TPOT", "TTFT", "UUIDs lost", "passkeys lost"]
    print_table(headers, rows, left=2)
    at, context = advice.measured_at, advice.context
    show(f"loss: KL to full KV, nats per token of the answer; loss, score and times are measured at {at} tokens,")
    show(f"questions {advice.question}, {advice.source}; times are ratios to full KV in this run")
    show(f"KV: of one prompt of {context} tokens, computed from the entries that each layer kept; * on the frontier")
    if at < context:
        show(f"note: nothing was measured at {context} tokens: the loss and times there may differ from those at {at}")
    for each in advice.candidates:
        if not each.acted:
            show(f"note: {each.name} did nothing at {at} tokens: they fit its budget, so nothing is known of it")
    show()
    _show_choice(advice, model)
    show()
    show("not tried:")
    for reason in [*advice.not_tried, f"contexts other than {at} tokens, other models, other kinds of text"]:
        show(f"  {reason}")


def _show_choice(advice: Advice, model: str | None) -> None:
    from kvsieve.advise.choose import plan_line, size

    limits, chosen = " and ".join(advice.limits.told()), advice.choice
    if chosen is None:
        assert advice.nearest is not None
        one, missing = advice.nearest
        by = ", ".join(f"{name} by a factor of {factor:.2f}" for name, factor in missing.items())
        show(f"recommended: none. No plan that was measured has {limits}.")
        show(f"The nearest is {one.name} (KV {size(one.kv_bytes)}, loss {one.loss:.3g}), which misses {by}.")
        return
    one = chosen.plan
    why = "the least memory" if advice.limits.by_memory else "the least loss"
    show(f"recommended: {plan_line(one.setting)}")
    parameters = dict(one.setting.given)
    stored = {role: parameters.pop(role, None) for role in PARTS}
    words = ["kvsieve run", *([] if model is None else [model]), "--method", spec(one.setting.method, parameters)]
    words += [f"--{role} {each}" for role, each in stored.items() if each is not None]
    show(f"    {' '.join(words)}")
    show(f"It has {why} of the plans with {limits}.")
    low, high = chosen.interval
    show(
        f"loss on {chosen.documents} documents held back: {chosen.loss:.3g}; for as many others at "
        f"{advice.measured_at} tokens expect {low:.2g} to {high:.2g} ({100 * chosen.level:.0f}% interval)"
    )
    for task, (lost, given) in one.lost.items():
        kind = "UUIDs" if "single_3" in task else "64-digit passkeys"
        if not lost:
            continue
        budget = chosen.survive.get(task)
        where = f"at {budget} of the same method they survive" if budget else "no budget tried keeps them all"
        show(f"warning: it loses {lost} of {given} {kind} that full KV gives; {where}")


def _row(one: Candidate, best: bool) -> list[str]:
    from kvsieve.advise.choose import size

    lost = [one.lost.get(task) for task in ("ruler_niah_single_3", "passkey64")]
    return [
        "*" if best else "",
        one.name,
        size(one.kv_bytes),
        f"{one.loss:.4f}",
        f"{100 * one.top1:.0f}%",
        f"{100 * one.score:.0f}%",
        "-" if one.tpot is None else f"{one.tpot_ratio:.2f} ({1000 * one.tpot:.0f} ms)",
        "-" if one.ttft_ratio is None else f"{one.ttft_ratio:.2f}",
        *("-" if each is None else f"{each[0]} of {each[1]}" for each in lost),
    ]


def _announce(context: int, length: int, seconds: float) -> None:
    where = "" if length >= context else f", not at {context}: --measure-at sets it"
    say(f"measuring at {length} tokens{where}; this takes about {duration(seconds)}")


def _tokens(text: str, option: str) -> int:
    found = parse_contexts(text, option)
    if len(found) != 1:
        raise InputError(f"{option} takes one number of tokens such as 7500 or 16k, got {text!r}")
    return found[0]


def _seconds(text: str) -> float:
    match = _TPOT.fullmatch(text.strip())
    if match is None:
        raise InputError(f"--tpot takes a time per token with its unit, such as 50ms or 0.1s, got {text!r}")
    return float(match[1]) * (0.001 if match[2].lower() == "ms" else 1.0)


def _picture_file(path: Path) -> Path:
    from kvsieve.report.plot_style import require_matplotlib

    path = Path(os.path.expanduser(path))
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"--plot must name a file in a folder that exists, got {str(path)!r}")
    require_matplotlib()
    return path
