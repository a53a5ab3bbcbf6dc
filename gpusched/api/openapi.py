"""The OpenAPI document of the socket API."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from gpusched import __version__
from gpusched.api.asked import RequestBody, schema_of
from gpusched.api.render import JOB_FIELDS
from gpusched.api.route import Route
from gpusched.api.schema import SPEC_FIELDS, UPDATE_FIELDS, json_schema, object_schema
from gpusched.errors import ABOUT

_OUTSIDE_NAMES = re.compile(r"\W+")
_ERROR = {"$ref": "#/components/responses/Error"}


def build(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI document of the socket API, from its routes and the fields of jobs."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpusched",
            "version": __version__,
            "description": "HTTP and JSON over a Unix socket; the caller is who the kernel says it is.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                "Spec": object_schema({name: json_schema(field) for name, field in SPEC_FIELDS.items()}),
                "Changes": object_schema({name: json_schema(field) for name, field in UPDATE_FIELDS.items()}),
                "Job": {
                    "type": "object",
                    "required": sorted(JOB_FIELDS),
                    "properties": {name: {} for name in JOB_FIELDS},
                },
            },
            "responses": {
                "Error": {
                    "description": "400 usage, 403 forbidden, 404 not found, 409 refused, 500 bug, "
                    "503 not ready, 507 disk full",
                    "content": {"application/json": {"schema": _error_schema()}},
                }
            },
        },
    }


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    problem = {**object_schema({"message": text, "hint": text}), "required": ["message", "hint"]}
    error = {
        **object_schema(
            {
                "message": text,
                "hint": text,
                "code": text,
                "about": {
                    "enum": list(ABOUT),
                    "description": "What of a submission or a step was refused; absent otherwise.",
                },
                "mistakes": {"type": "array", "items": problem},
            }
        ),
        "required": ["message", "hint", "code"],
    }
    return {
        **object_schema({"schema_version": {"const": 1}, "error": error}),
        "required": ["schema_version", "error"],
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _OUTSIDE_NAMES.sub("_", f"{route.method.lower()}{route.path.removeprefix('/v1')}").strip("_"),
        "responses": {
            "200": {
                "description": f"carries {route.answers}",
                "content": {
                    route.content: {"schema": {"type": "object" if route.content == "application/json" else "string"}}
                },
            },
            "default": _ERROR,
        },
    }
    asks = schema_of(route.asks)
    if issubclass(route.asks, RequestBody):
        operation["requestBody"] = {"content": {"application/json": {"schema": asks}}}
        parameters = []
    else:
        parameters = [_parameter(name, shape) for name, shape in asks["properties"].items()]
    if "{id}" in route.path:
        parameters.insert(0, {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        operation["parameters"] = parameters
    return operation


def _parameter(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A parameter of a query, where nothing is null."""
    own = {key: value for key, value in shape.items() if key != "description"}
    if isinstance(own["type"], list):
        own["type"] = own["type"][0]
    return {
        "name": name,
        "in": "query",
        "required": False,
        "description": shape.get("description", ""),
        "schema": own,
    }
