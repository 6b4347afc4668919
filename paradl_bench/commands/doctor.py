"""``paradl-bench doctor``: what this machine can measure."""

from __future__ import annotations

import click

from paradl_bench.terminal import open_console


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def COMMAND(as_json: bool) -> None:  # noqa: N802
    """Show devices, backends, tools and versions, what is missing, and what that costs."""
    import msgspec

    from paradl_bench.measure.doctor import examine

    findings = examine()
    if as_json:
        click.echo(msgspec.json.encode(findings).decode())
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "found", "without it")
    for finding in findings:
        table.add_row(
            finding.name,
            "[yellow]missing[/]" if finding.found is None else escape(finding.found),
            escape(_cost(finding.without)) if finding.found is None else "",
        )
    open_console().print(table)


def _cost(without: str) -> str:
    return without if without.startswith(("only", "nothing")) else f"no {without}"
