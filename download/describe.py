"""Results in words: what `python -m download` prints for people."""

from __future__ import annotations

from container.progress import duration, size
from download.audit import Audit
from download.plan import Plan
from download.run import Summary, shown_names

SHOWN = 40


def plan_text(plan: Plan) -> str:
    """A dry run's plan for people."""
    listing = plan.listing
    begun = [file for file in plan.missing if plan.part_bytes[file.name]]
    lines = [
        f"{listing.repository} at {listing.commit}",
        f"files:    {len(plan.choice.files)} with {size(plan.choice.n_bytes)} ({plan.choice.n_bytes:,} bytes) of "
        f"{len(listing.files)} in the repository",
        f"present:  {size(plan.present_bytes)}: {len(plan.proved)} files proved, {len(plan.unproved)} to be proved, "
        f"{len(begun)} begun",
        f"to fetch: {size(plan.missing_bytes)} in {len(plan.missing)} files",
        f"disk:     {size(plan.free_bytes)} free, {size(plan.min_free_bytes)} to stay so",
    ]
    lines += [
        f"{size(plan.present_of(file)):>12} of {size(file.n_bytes):>12}  {file.name}" for file in plan.choice.files
    ]
    lines += [*_left_out(plan.choice.left_out), *_given_back(plan.choice.given_back)]
    lines += [f"problem: {plan.shortage}"] if plan.shortage else []
    return "\n".join(lines)


def summary_text(summary: Summary) -> str:
    """A run's result for people."""
    lines = []
    if summary.n_fetched:
        rate = summary.fetched_bytes / max(summary.elapsed_seconds, 1e-9)
        lines.append(
            f"{summary.n_fetched} files, {size(summary.fetched_bytes)} fetched in {duration(summary.elapsed_seconds)}: "
            f"{size(rate)}/s"
        )
    lines += [*_left_out(summary.left_out), *_given_back(summary.given_back)]
    whole = "complete and proved" if summary.complete else "as asked, but not a complete checkpoint"
    lines.append(f"{summary.folder} is {whole}: {summary.n_files} files, {size(summary.total_bytes)}")
    return "\n".join(lines)


def audit_text(audit: Audit) -> str:
    """An audit's result for people."""
    lines = [f"note: {note}" for note in audit.notes]
    lines += _left_out(audit.left_out)
    compared = "sizes" if audit.check.value == "size" else "checksums"
    subject = f"{audit.folder} against {audit.repository} at {audit.revision[:12]}, {compared}"
    if audit.problems:
        lines += [f"problem: {problem}" for problem in audit.problems[:SHOWN]]
        if len(audit.problems) > SHOWN:
            lines.append(f"… and {len(audit.problems) - SHOWN} more")
        lines.append(f"{subject}: {len(audit.problems)} of {audit.n_files} files are not right")
        lines.append(f"`python -m download {audit.repository} {audit.folder}` fetches what is missing or wrong")
    else:
        lines.append(f"{subject}: all {audit.n_files} files are right ({size(audit.total_bytes)})")
    return "\n".join(lines)


def _given_back(names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    return [f"not fetched again, as a conversion has given them back (--include NAME does it): {shown_names(names)}"]


def _left_out(names: tuple[str, ...]) -> list[str]:
    return [f"left out, though a conversion needs them: {shown_names(names)}"] if names else []
