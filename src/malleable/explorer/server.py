"""Shows the page to this machine, and to nobody else unless told to."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from unittest.mock import patch

from malleable.explorer.explorer import Explorer
from malleable.explorer.scenes import LARGEST_FILE
from malleable.explorer.views import source


@contextmanager
def served(explorer: Explorer, host: str = "127.0.0.1", port: int | None = None) -> Iterator[str]:
    """Serve the page of ``explorer`` at the address that is given, until the end of the block.

    What is handed in lies in a folder of its own for as long. Nothing is fetched from elsewhere or told to anybody.
    """
    _check_address(host, port)
    with TemporaryDirectory(prefix="malleable-explore-") as folder:
        # Gradio reads these when it is imported, and would keep files and ask its makers for news.
        settings = {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
        with patch.dict(os.environ, settings):
            import gradio as gr

            from malleable.explorer.page import build

            page = build(explorer)
            try:
                _, address, _ = page.launch(
                    server_name=f"[{host}]" if ":" in host else host,
                    server_port=port,
                    share=False,
                    inbrowser=False,
                    prevent_thread_lock=True,
                    quiet=True,
                    max_file_size=LARGEST_FILE,
                    footer_links=[],
                    run_history=False,
                    enable_monitoring=False,
                    mcp_server=False,
                    ssr_mode=False,
                    pwa=False,
                    allowed_paths=[],
                    theme=gr.themes.Default(
                        primary_hue="slate",
                        spacing_size="sm",
                        font=["system-ui", "sans-serif"],
                        font_mono=["ui-monospace", "monospace"],
                    ),
                    css=source("page.css"),
                )
                yield address
            finally:
                page.close(verbose=False)


def _check_address(host: str, port: int | None) -> None:
    """Refuse an address that nothing can be served at; Gradio's own words name settings that are not ours."""
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"port must lie between 1 and 65535, got {port}")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port or 0))
    except OSError as error:
        where = f"host {host}" if port is None else f"port {port} of {host}"
        raise ValueError(f"{where} cannot be used ({error}); give another --host or --port, or none") from error
