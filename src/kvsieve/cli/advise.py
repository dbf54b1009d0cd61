"""`kvsieve advise`: measure a few plans and recommend one for a model, a context and a limit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsieve.cli.evaluate import budgets_of
from kvsieve.cli.loading import (
    DeviceOption,
    DtypeOption,
    WeightsOption,
    check_device,
    check_loading,
    check_model_name,
    load_model,
    refuse_text,
)
from kvsieve.cli.options import (
    LIMITS,
    MEASUREMENT,
    MEMORY,
    METHOD,
    OUTPUT,
    TASKS,
    GeneratedSeedOption,
    ModelArgument,
    expanded,
    option,
)
from kvsieve.cli.output import (
    NARROW,
    WIDE,
    JsonOption,
    WideOption,
    check_writable,
    emit_json,
    print_table,
    progress_bar,
    saved,
    say,
    show,
)
from kvsieve.cli.specs import (
    PARTS,
    CodecsOption,
    PrefillsOption,
    RestsOption,
    check_budget_used,
    method_specs,
    parse_parts,
    run_line,
    spec,
)
from kvsieve.lab.advise.choose import PlanLimits
from kvsieve.lab.advise.material import built_in, from_file
from kvsieve.lab.advise.options import BUDGETS, AdviceOptions
from kvsieve.lab.eval.cells import settings
from kvsieve.planning.named import crossed
from kvsieve.planning.quantities import format_seconds, parse_length, parse_seconds
from kvsieve.report.plot_style import require_matplotlib

if TYPE_CHECKING:
    from kvsieve.lab.advise import Advice, AdviceOptions
    from kvsieve.lab.advise.choose import Candidate

_METHODS = "snapkv,adakv,fastkv,asl,lagkv,rocketkv,rocketkv-mt,streamingllm"


def advise_command(
    model: ModelArgument = None,
    context: Annotated[str, option(LIMITS, "Prompt length in tokens: 7500 or 16k")] = "8k",
    memory: Annotated[
        int | None, option(LIMITS, "Memory for the KV cache of one prompt: 2GiB, 300MB (default: no limit)", **MEMORY)
    ] = None,
    tpot: Annotated[str | None, option(LIMITS, "Time per token: 50ms, 0.1s (default: no limit)")] = None,
    loss: Annotated[
        float | None, option(LIMITS, "KL divergence to full KV, nats per token (default: 0.02 without other limits)")
    ] = None,
    methods: Annotated[str, option(METHOD, "Methods to measure, such as snapkv:kernel=21,kvzip")] = _METHODS,
    budgets: Annotated[
        str, option(METHOD, "Budgets of each method: 10%,20% (default: a few shares, or those that fit)")
    ] = "",
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    task: Annotated[
        Path | None,
        option(TASKS, "Text file, or .jsonl with context, question and answer per row (default: built-in tasks)"),
    ] = None,
    question: Annotated[str, option(TASKS, "Question mode: visible or hidden to the eviction")] = "visible",
    samples: Annotated[int, option(TASKS, "Prompts per task to choose by, and as many to validate")] = 3,
    seed: GeneratedSeedOption = 0,
    measure_at: Annotated[
        str | None, option(MEASUREMENT, "Measured prompt length, in tokens (default: one that takes minutes)")
    ] = None,
    cost_samples: Annotated[int, option(MEASUREMENT, "Timed runs per plan; 0 skips timing")] = 2,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    plot: Annotated[
        Path | None, option(OUTPUT, "PNG file: loss against memory and time (default: none)", callback=expanded)
    ] = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Recommend a plan for a context length and a limit on memory, time or loss, by measuring the model."""
    refuse_text(model, "--task")
    check_loading(dtype, device)
    tokens = parse_length(context, "--context")
    measured = None if measure_at is None else parse_length(measure_at, "--measure-at")
    seconds = None if tpot is None else parse_seconds(tpot, "--tpot")
    specs = method_specs(methods)
    shares = budgets_of(budgets)
    check_budget_used("--budgets", budgets, specs)
    parts = parse_parts(codec, rest, prefill)
    if plot is not None:
        check_writable("--plot", plot)
        require_matplotlib()
    options = AdviceOptions(
        context=tokens,
        limits=PlanLimits(memory=memory, tpot=seconds, loss=loss),
        methods=tuple(specs),
        codecs=tuple(parts[0]),
        rests=tuple(parts[1]),
        prefills=tuple(parts[2]),
        budgets=tuple(shares),
        samples=samples,
        measure_at=measured,
        question=question,
        cost_samples=cost_samples,
        seed=seed,
    )
    options.check(None)
    settings(crossed(specs, *parts), shares or list(BUDGETS))
    material = built_in() if task is None else from_file(task)
    check_model_name(model, weights)
    check_device(device)
    _check_model(model, dtype, device, options)

    from kvsieve.lab.advise import advise
    from kvsieve.models.fetch import MODEL_NAME

    loaded, tokenizer = load_model(model, dtype, device, weights)
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
    drawn = True
    if plot is not None:
        from kvsieve.lab.advise.plot import frontier_png

        drawn = saved("--plot", plot, frontier_png(found))
    if as_json:
        emit_json(found.to_dict())
    else:
        print_advice(found, model, {"dtype": dtype, "weights": weights, "device": device}, wide)
        if plot is not None and drawn:
            show(f"the picture is in {plot}")
    if found.choice is None or not drawn:
        raise typer.Exit(1)


def _check_model(name: str | None, dtype: str, device: str | None, options: AdviceOptions) -> None:
    """Raise the errors of `advise` that follow from the model's config, before weights are loaded."""
    if name is None:
        return  # the demo model loads fast
    import torch

    from kvsieve.cli.estimate import model_config
    from kvsieve.devices import auto_dtype
    from kvsieve.hf.model.context import context_of
    from kvsieve.hf.model.shapes import meta_model
    from kvsieve.lab.advise.settings import candidates
    from kvsieve.lab.eval.evaluator import Evaluator
    from kvsieve.models import load_tokenizer

    config = model_config(name)
    options.check(context_of(config))
    known = {"auto": auto_dtype(device).dtype, "checkpoint": config.dtype or torch.float32}
    model = meta_model(config).to(known[dtype] if dtype in known else getattr(torch, dtype))
    candidates(Evaluator(model, load_tokenizer(name)), options)


def print_advice(advice: Advice, model: str | None, loading: dict[str, str | None], wide: bool = False) -> None:
    """Print a table of all plans, and the recommended one. loading: options by which the model was loaded."""
    from kvsieve.lab.advise.choose import on_frontier

    rows = [_row(candidate, on_frontier(candidate, advice.candidates)) for candidate in advice.candidates]
    headers = ["", "plan", "KV", "loss", "score", "TPOT", "TTFT", "top-1", "UUIDs lost", "passkeys lost"]
    shown = len(headers) if wide else 6
    print_table(headers[:shown], [row[:shown] for row in rows], left=2, width=WIDE if wide else NARROW)
    at = advice.measured_at
    context = advice.context
    show(f"loss: KL to full KV, nats per token of the answer; loss, score and times are measured at {at} tokens,")
    show(f"questions {advice.question}, {advice.source}; times are ratios to full KV in this run")
    show(f"KV: of one prompt of {context} tokens, computed from the entries that each layer kept; * on the frontier")
    if at < context:
        show(f"note: nothing was measured at {context} tokens: the loss and times there may differ from those at {at}")
    if advice.caution is not None:
        show(f"note: {advice.caution}")
    for candidate in advice.candidates:
        if not candidate.acted:
            show(f"note: {candidate.name} did nothing at {at} tokens: they fit its budget, so nothing is known of it")
    show()
    _show_choice(advice, model, loading)
    show()
    show("not tried:")
    for reason in [*advice.not_tried, f"contexts other than {at} tokens, other models, other kinds of text"]:
        show(f"  {reason}")


def _show_choice(advice: Advice, model: str | None, loading: dict[str, str | None]) -> None:
    from kvsieve.lab.advise.choose import plan_line, size

    limits = " and ".join(advice.limits.describe())
    chosen = advice.choice
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
    show(f"    {run_line(model, {'method': spec(one.setting.method, parameters), **stored, **loading})}")
    show(f"It has {why} of the plans with {limits}.")
    if (gain := chosen.drafts) is not None:
        verdict = "worth adding" if gain.pays else "no gain here"
        answers = "1 answer" if gain.prompts == 1 else f"{gain.prompts} answers"
        show(
            f"--draft lookup: {verdict}: {gain.tokens_per_pass:.1f} tokens per pass and {gain.tpot_ratio:.2f} of the "
            f"time per token in {answers}"
        )
    low, high = chosen.interval
    prompts = "1 prompt" if chosen.documents == 1 else f"{chosen.documents} prompts"
    show(
        f"loss on {prompts} held back: {chosen.loss:.3g}; for as many others at "
        f"{advice.measured_at} tokens expect {low:.2g} to {high:.2g} ({100 * chosen.level:.0f}% interval)"
    )
    for task, (lost, total) in one.lost.items():
        kind = "UUIDs" if "single_3" in task else "64-digit passkeys"
        if not lost:
            continue
        budget = chosen.survive.get(task)
        where = f"at {budget} of the same method they survive" if budget else "no budget tried keeps them all"
        show(f"warning: it loses {lost} of {total} {kind} that full KV gives; {where}")


def _row(one: Candidate, best: bool) -> list[str]:
    from kvsieve.lab.advise.choose import size

    lost = [one.lost.get(task) for task in ("ruler_niah_single_3", "passkey64")]
    return [
        "*" if best else "",
        one.name,
        size(one.kv_bytes),
        f"{one.loss:.4f}",
        f"{100 * one.score:.0f}%",
        "-" if one.tpot is None else f"{one.tpot_ratio:.2f} ({1000 * one.tpot:.0f} ms)",
        "-" if one.ttft_ratio is None else f"{one.ttft_ratio:.2f}",
        f"{100 * one.top1:.0f}%",
        *("-" if pair is None else f"{pair[0]} of {pair[1]}" for pair in lost),
    ]


def _announce(context: int, length: int, seconds: float) -> None:
    where = "" if length >= context else f", not at {context}: --measure-at sets it"
    say(f"measuring at {length} tokens{where}; this takes about {format_seconds(seconds)}")
