"""The OpenAPI 3.1 document of the server, made from the types that decode and encode.

Comes in: the server's settings. Goes out: a dict for `/openapi.json`. What a field means comes
from the lists in `fields.py`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from aneuron.server.http.guard import OPEN_PATHS
from aneuron.server.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from aneuron.server.wire.completions import MAX_PROMPTS, CompletionBody, CompletionRequest
from aneuron.server.wire.messages import TextPart
from aneuron.server.wire.misc import (
    MAX_TIMELINE_STEPS,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorBody,
    ModelCard,
    ModelList,
    Probe,
    TimelineNumbers,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from aneuron.server.wire.responses import MAX_ITEMS, ResponsesRequest
from aneuron.server.wire.responses.answer import Response
from aneuron.server.wire.responses.items import ITEMS, InputText, ReasoningTextPart, SummaryText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aneuron.server.config import ServerConfig
    from aneuron.server.wire.decoding import Request

__all__ = ["openapi"]

_REQUESTS = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_ANSWERS = (
    ChatCompletion,
    ChatChunk,
    CompletionBody,
    Response,
    ErrorBody,
    ModelCard,
    ModelList,
    Probe,
    TimelineNumbers,
    TokenizeResponse,
    DetokenizeResponse,
    Version,
)
# Where a list takes nothing else, the decoder takes them without their `type`.
_LONE_PARTS = (TextPart, InputText, SummaryText, ReasoningTextPart)
_PICTURE = {"image/svg+xml": {"schema": {"type": "string"}}}
_SCHEMAS = "#/components/schemas/"
_FAULTS = {
    "400": "A field is wrong, or is not supported",
    "401": "The API key is missing or wrong",
    "404": "There is no such model",
    "413": "The body is too large",
    "429": "Too many requests wait",
    "500": "The device failed, or the server",
    "503": "The server is starting, or stopping",
}
_BODY_FAULTS = ("400", "404", "413", "429", "500", "503")
_TOKEN = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def openapi(
    config: ServerConfig, *, model_names: Sequence[str] = (), root_path: str = ""
) -> dict[str, Any]:
    """Return the document.

    Args:
        config: of the server.
        model_names: the names that `model` may have; () takes the settings', where there are any.
        root_path: below which the paths are, in an app that this one is mounted in.
    """
    from aneuron import __version__

    components: dict[str, Any] = {"schemas": _schemas(model_names or config.served_model_names)}
    if config.api_keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aneuron",
            "version": __version__,
            "description": "OpenAI's chat completions, completions and responses, and more.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": _secured(_api_paths() | _plain_paths(), has_keys=bool(config.api_keys)),
        "components": components,
    }


def _schemas(model_names: Sequence[str]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(
        (*_REQUESTS, *_ANSWERS, *ITEMS.values()), ref_template=_SCHEMAS + "{name}"
    )
    for kind in _REQUESTS:
        _describe(schemas[kind.__name__], kind, model_names)
    for part in _LONE_PARTS:
        schemas[part.__name__]["required"].remove("type")
    for schema in schemas.values():
        if schema.get("additionalProperties") is False:  # what is not known may be null: nulls.py
            schema["additionalProperties"] = {"type": "null"}
    schemas["CompletionRequest"]["properties"]["prompt"] |= _prompt()
    schemas["ResponsesRequest"]["properties"]["input"] |= _input()
    return schemas


def _describe(schema: dict[str, Any], kind: type[Request], model_names: Sequence[str]) -> None:
    """Write what fields mean, and which are taken without effect; others are refused."""
    properties = schema["properties"]
    for name, text in kind.fields.honoured.items():
        properties[name]["description"] = text
    for name, text in kind.fields.ignored.items():
        properties[name] = {"description": f"No effect: {text}"}
    schema["additionalProperties"] = False
    if model_names:
        properties["model"]["enum"] = [*model_names]
        if "model" not in schema.get("required", ()):
            properties["model"]["enum"].append(None)


def _prompt() -> dict[str, Any]:
    ids = {"type": "array", "items": _TOKEN, "minItems": 1}
    many = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
    texts = {**many, "items": {"type": "string"}}
    return {"anyOf": [{"type": "string"}, texts, ids, {**many, "items": ids}]}


def _input() -> dict[str, Any]:
    items = [{"$ref": _SCHEMAS + kind.__name__} for kind in ITEMS.values()]
    many = {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": {"anyOf": items}}
    return {"anyOf": [{"type": "string"}, many]}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _SCHEMAS + name}}}


def _answer(description: str, content: dict[str, Any]) -> dict[str, Any]:
    header = {"description": "names the request in logs", "schema": {"type": "string"}}
    return {"description": description, "headers": {"x-request-id": header}, "content": content}


def _faults(*statuses: str) -> dict[str, Any]:
    faults = {status: _answer(_FAULTS[status], _json("ErrorBody")) for status in statuses}
    wait = {"schema": {"type": "integer", "minimum": 1}, "description": "seconds"}
    for status in {"429", "503"} & set(statuses):
        faults[status]["headers"]["retry-after"] = wait
    return faults


def _operation(
    name: str, summary: str, content: dict[str, Any], *faults: str, **more: Any
) -> dict[str, Any]:
    responses = {"200": _answer("The answer", content), **_faults(*faults)}
    return {"operationId": name, "summary": summary, "responses": responses, **more}


def _post(name: str, summary: str, body: str, content: dict[str, Any]) -> Any:
    taken = {"required": True, "content": _json(body)}
    made = _operation(name, summary, content, *_BODY_FAULTS, requestBody=taken)
    return {"post": made}


def _streamed(name: str, event: dict[str, Any]) -> dict[str, Any]:
    return {**_json(name), "text/event-stream": {"schema": event}}


def _event(data: dict[str, Any], *, done: bool, **fields: Any) -> dict[str, Any]:
    """Return the schema of one event: OpenAPI 3.1 has no word for a stream of them."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    last = [{"const": "[DONE]", "description": "Says that no more comes"}] if done else []
    properties = {"data": {"anyOf": [*last, text]}, **fields}
    return {
        "type": "object",
        "description": "Each event of the stream",
        "properties": properties,
        "required": [*properties],
    }


def _chunks(name: str) -> dict[str, Any]:
    data = [{"$ref": _SCHEMAS + one} for one in (name, "ErrorBody")]
    return _event({"anyOf": data}, done=True)


def _typed_events() -> dict[str, Any]:
    properties = {"type": {"type": "string"}, "sequence_number": {"type": "integer", "minimum": 0}}
    data = {"type": "object", "properties": properties, "required": [*properties]}
    name = {"type": "string", "description": "The `type` of its data, as OpenAI has them"}
    return _event(data, done=False, event=name)


def _api_paths() -> dict[str, Any]:
    chat = _streamed("ChatCompletion", _chunks("ChatChunk"))
    text = _streamed("CompletionBody", _chunks("CompletionBody"))
    items = _streamed("Response", _typed_events())
    ids, spelled = _json("TokenizeResponse"), _json("DetokenizeResponse")
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    card = _operation("get_model", "One of them", _json("ModelCard"), "404", parameters=[name])
    return {
        "/v1/chat/completions": _post("chat", "Continue a conversation", "ChatRequest", chat),
        "/v1/completions": _post("complete", "Continue a text", "CompletionRequest", text),
        "/v1/responses": _post("respond", "Answer a conversation", "ResponsesRequest", items),
        "/v1/models": {"get": _operation("list_models", "Served names", _json("ModelList"))},
        "/v1/models/{model}": {"get": card},
        "/tokenize": _post("tokenize", "Text or messages to ids", "TokenizeRequest", ids),
        "/detokenize": _post("detokenize", "Ids to text", "DetokenizeRequest", spelled),
    }


def _plain_paths() -> dict[str, Any]:
    plain = {"text/plain": {"schema": {"type": "string"}}}
    anything = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/version": {"get": _operation("version", "The version", _json("Version"))},
        "/health": {"get": _probe("health", "Whether the engine lives")},
        "/ready": {"get": _probe("ready", "Whether it takes work")},
        "/metrics": {"get": _operation("metrics", "For Prometheus", plain)},
        "/openapi.json": {"get": _operation("openapi", "This document", anything)},
        "/timeline.json": _timeline("timeline", "Counts of now", _json("TimelineNumbers")),
        "/timeline.svg": _timeline("timeline_picture", "A picture of the last steps", _PICTURE),
    }


def _timeline(name: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    size = {"type": "integer", "minimum": 1, "maximum": MAX_TIMELINE_STEPS, "default": 24}
    what = "of the last steps, that it is about"
    steps = {"name": "steps", "in": "query", "description": what, "schema": size}
    return {"get": _operation(name, summary, content, "400", "503", parameters=[steps])}


def _secured(paths: dict[str, Any], *, has_keys: bool) -> dict[str, Any]:
    """Return the paths with what needs a key marked so, where there are keys."""
    for path, operations in paths.items():
        for operation in operations.values() if has_keys and path not in OPEN_PATHS else ():
            operation["security"] = [{"bearer": []}]
            operation["responses"] |= _faults("401")
    return paths


def _probe(name: str, summary: str) -> dict[str, Any]:
    made = _operation(name, summary, _json("Probe"))
    made["responses"]["503"] = _answer("It does not; the reason says why", _json("Probe"))
    return made
