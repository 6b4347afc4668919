"""The page of ``predict explore``, opened from a script or a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from predict.validation.report.explore.opening import begin
from predict.validation.report.explore.server import serve_beside


class ExplorePage:
    """A page for this machine only, which is served until :meth:`stop` or the end of the process.

    Attributes:
        address: the address to open in a browser; it holds a token.
        tunnel: the ssh command that brings the page to your own machine; empty if this is your machine.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        page = begin(options)
        self.address, self.tunnel = page.address, page.tunnel
        self._stop = serve_beside(page.application, page.at)

    def stop(self) -> None:
        """Stop serving the page."""
        self._stop()

    def __repr__(self) -> str:
        from_far = f" (from your own machine: {self.tunnel})" if self.tunnel else ""
        return f"Open {self.address}{from_far}"

    def _repr_html_(self) -> str:
        link = f'<a href="{html.escape(self.address)}" target="_blank">{html.escape(self.address)}</a>'
        return f"<p>Open {link}</p>" + (f"<pre>{html.escape(self.tunnel)}</pre>" if self.tunnel else "")
