"""The frame of an HTML page: title, CSS, body, and a content security policy that forbids the browser to load anything."""

import base64
import hashlib
from collections.abc import Iterable

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, style: str, body: Iterable[str], script: str = "") -> str:
    """Returns the whole HTML file. `title` must be escaped. The policy allows only `script`, identified by its hash."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}{allowed(script)}">',
            f"<title>{title}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            *body,
            *([f"<script>{script}</script>"] if script else []),
            "</body>",
            "</html>\n",
        ]
    )


def allowed(script: str) -> str:
    """Returns the policy's entry that allows the script; "" if there is no script."""
    if not script:
        return ""
    return f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
