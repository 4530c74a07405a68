"""`/docs`: the OpenAPI document as one page, without script and without anything from another host.

The page is a function of the document, so it shows what the server accepts. A client that wants more than reading (a
generated client, requests from a form) loads `/openapi.json` into its own tool.
"""

import base64
import hashlib
import json
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from jinja2 import Environment

PATH = "/docs"

_STYLE = """
:root { color-scheme: light dark; --rule: #8885; --quiet: #8881; }
html { background: Canvas; color: CanvasText; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h2 { border-bottom: 1px solid var(--rule); margin-top: 2.5rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--quiet); padding: .75rem; overflow-x: auto; white-space: pre-wrap; }
details { border: 1px solid var(--rule); border-radius: 6px; margin: .5rem 0; padding: .4rem .75rem; }
summary { cursor: pointer; }
summary b { display: inline-block; min-width: 4.5rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--rule); padding: .3rem .5rem; text-align: left; vertical-align: top; }
"""

_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ info.title }} API {{ info.version }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>{{ info.title }} API {{ info.version }}</h1>
<p>{{ info.description | replace("`", "") }}</p>
<p>The same as <a href="/openapi.json">OpenAPI document</a>.
Errors are problems (RFC 9457) with a reason and a hint.</p>
<h2>Requests</h2>
{% for one in operations %}
<details>
<summary><b>{{ one.method }}</b> <code>{{ one.path }}</code> {{ one.description }}</summary>
{% if one.parameters %}
<table><thead><tr><th>parameter</th><th>in</th><th>type</th><th>meaning</th></tr></thead><tbody>
{% for parameter in one.parameters %}
<tr><td><code>{{ parameter.name }}</code>{{ " (required)" if parameter.required }}</td><td>{{ parameter.in }}</td>
<td>{{ parameter.kind }}</td><td>{{ parameter.description }}</td></tr>
{% endfor %}
</tbody></table>
{% endif %}
{% if one.body %}<p>Body: <a href="#{{ one.body }}"><code>{{ one.body }}</code></a></p>{% endif %}
{% if one.answer %}<p>Answer: <a href="#{{ one.answer }}"><code>{{ one.answer }}</code></a></p>{% endif %}
</details>
{% endfor %}
<h2>Schemas</h2>
{% for name, schema in schemas %}
<details id="{{ name }}"><summary><code>{{ name }}</code> {{ schema.words }}</summary>
<pre>{{ schema.text }}</pre></details>
{% endfor %}
</main>
</body>
</html>
""")


def install(app: FastAPI) -> None:
    """Serve the page. It is rendered once: routes do not change while a server runs."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    headers = {"Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
                                          "form-action 'none'; frame-ancestors 'none'"}
    rendered: list[str] = []

    @app.get(PATH, include_in_schema=False)
    def docs() -> HTMLResponse:
        if not rendered:
            rendered.append(render(app.openapi()))
        return HTMLResponse(rendered[0], headers=headers)


def render(document: dict[str, Any]) -> str:
    operations = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = [_schema_name(answer) for status, answer in operation.get("responses", {}).items()
                       if status.startswith("2")]
            operations.append({
                "method": method.upper(), "path": path, "description": operation.get("description", ""),
                "parameters": [parameter | {"kind": _kind(parameter.get("schema", {}))}
                               for parameter in operation.get("parameters", ())],
                "body": _schema_name(operation.get("requestBody", {})),
                "answer": next((name for name in answers if name), "")})
    schemas = [(name, {"words": (schema.get("description") or "").split("\n\n")[0],
                       "text": json.dumps(schema, indent=2)})
               for name, schema in sorted(document["components"]["schemas"].items())]
    return _PAGE.render(info=document["info"], operations=operations, schemas=schemas, style=_STYLE)


def _schema_name(part: dict[str, Any]) -> str:
    """The schema that a body or an answer refers to; empty for none."""
    for content in part.get("content", {}).values():
        if "$ref" in content.get("schema", {}):
            return str(content["schema"]["$ref"]).rpartition("/")[2]
    return ""


def _kind(schema: dict[str, Any]) -> str:
    options = [option.get("type", "") for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    return str(schema.get("type") or " or ".join(filter(None, options)))
