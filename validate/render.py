"""The result of a validation as text for people."""

from __future__ import annotations

from container.progress import duration, size
from validate.report import (
    Estimate,
    LogitsReport,
    Report,
    RouterReport,
    StructureReport,
    TextReport,
    WeightsReport,
)


def report_text(report: Report) -> str:
    """The report in lines, the verdict last."""
    lines = _structure_lines(report.structure)
    if report.weights is not None:
        lines += _weights_lines(report.weights)
    if report.logits is not None:
        lines += _logits_lines(report.logits)
    if report.text is not None:
        lines += _text_lines(report.text)
    lines += [f"note: {note}" for note in report.findings.notes]
    lines += [f"problem: {problem}" for problem in report.findings.problems]
    unlisted = report.findings.n_problems - len(report.findings.problems)
    if unlisted:
        lines.append(f"… and {unlisted} more")
    verdict = "all checks hold" if report.ok else f"{report.findings.n_problems} problem(s) found"
    return "\n".join([*lines, f"{report.container}: {verdict}"])


def _structure_lines(structure: StructureReport) -> list[str]:
    return [
        f"structure: {_verdict(structure.ok)}; {structure.n_files} files, {structure.n_records} expert records, "
        f"{structure.n_codebooks} codebooks, {structure.n_trunk_tensors} trunk tensors, {structure.n_checksums} "
        f"checksums; {size(structure.bytes_read)} read in {_seconds(structure.seconds)}"
    ]


def _weights_lines(weights: WeightsReport) -> list[str]:
    lines = [
        f"weights: {_verdict(weights.ok)}; {len(weights.tensors)} tensors compared with the checkpoint in "
        f"{_seconds(weights.seconds)}"
    ]
    if weights.kinds:
        lines.append(f"  {'':<6}{'tensors':>9}{'weights':>19}{'relative error':>17}{'worst':>10}{'bound':>9}")
    for kind, error in weights.kinds.items():
        lines.append(
            f"  {kind:<6}{error.n_tensors:>9}{error.n_weights:>19,}{error.relative_error:>17.3%}"
            f"{error.worst:>10.3%}{error.bound:>9.0%}"
        )
    lines += [f"  worst: {tensor.name} ({tensor.fmt}) {tensor.relative_error:.3%}" for tensor in weights.worst[:3]]
    return lines


def _logits_lines(logits: LogitsReport) -> list[str]:
    n_positions = sum(len(prompt.ids) for prompt in logits.prompts)
    layer = max(range(len(logits.per_layer)), key=logits.per_layer.__getitem__)
    lines = [
        f"logits: {_verdict(logits.ok)}; runtime against reference, {len(logits.prompts)} prompts, {n_positions} "
        f"positions, in {_seconds(logits.seconds)}",
        f"  relative error {logits.relative_error:.2e} ({_forms(logits)}; tolerance {logits.tolerance:.0e}); largest "
        f"after a layer {logits.per_layer[layer]:.2e} (layer {layer})",
        f"  argmax {'equal' if logits.argmax_equal else 'NOT equal'} at every position; top-10 sets equal at "
        f"{logits.top10_equal:.1%}; routing {'equal' if logits.routing_equal else 'NOT equal'}",
    ]
    if logits.kl is not None and logits.top1_agreement is not None:
        lines.append(
            f"  original against converted model: KL {logits.kl:.4f} nats per position, same first choice at "
            f"{logits.top1_agreement:.1%}"
        )
    if logits.router is not None:
        lines.append(f"  {_router_line(logits.router)}")
    return lines


def _forms(logits: LogitsReport) -> str:
    """The errors of the runtime's two forms."""
    one_by_one = f"token by token {logits.token_by_token_error:.2e}"
    return one_by_one if logits.chunks_error is None else f"in chunks {logits.chunks_error:.2e}, {one_by_one}"


def _text_lines(text: TextReport) -> list[str]:
    figures = text.figures
    lines = [
        f"text: {_verdict(text.ok)}; container against source on {text.n_tokens:,} tokens of {text.file}, "
        f"{figures.n_windows:,} window(s) of {text.window}, each from an empty state, in {_seconds(text.seconds)}",
        f"  perplexity {figures.perplexity_source:.3f} source, {figures.perplexity_container:.3f} container "
        f"(× {figures.perplexity_ratio:.4f}); logarithm of the ratio "
        f"{_estimate(figures.log_perplexity_difference, '+.4f')}",
        f"  KL {_estimate(figures.kl, '.4f')} nats per position; same first choice at "
        f"{_estimate(figures.top1_agreement, '.2%')}",
    ]
    if figures.kl.low is not None:
        lines.append(
            f"  […] holds {figures.confidence:.0%} of {figures.n_resamples:,} resamplings of the windows; it tells how "
            "far another choice of such text would move the figure"
        )
    lines.append(f"  {'position in the window':<24}{'positions':>11}{'KL':>9}{'same first choice':>20}")
    for each in figures.bins:
        span = f"{each.first}" if each.first == each.last else f"{each.first} to {each.last}"
        lines.append(f"  {span:<24}{each.n_positions:>11,}{each.kl:>9.4f}{each.top1_agreement:>20.2%}")
    return [*lines, f"  {_router_line(text.router)}"]


def _router_line(router: RouterReport) -> str:
    """The stored router's changes, and the layer that has most of them."""
    if not router.n_choices:
        return "router as stored: the model chooses no experts"
    line = (
        f"router as stored, on the source's states: {router.n_changed:,} of {router.n_choices:,} choices of an expert "
        f"change ({router.n_changed / router.n_choices:.3%}), at {router.n_tokens_changed:,} of {router.n_tokens:,} "
        "tokens"
    )
    worst = max(router.layers, key=lambda layer: layer.n_changed)
    if not worst.n_changed:
        return line
    return f"{line}; most in layer {worst.layer}, {worst.n_changed / worst.n_choices:.3%}"


def _estimate(estimate: Estimate, form: str) -> str:
    value = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{format(estimate.low, form)}, {format(estimate.high, form)}]"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _verdict(ok: bool) -> str:
    return "ok" if ok else "FAILED"
