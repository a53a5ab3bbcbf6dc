"""The OpenAPI document of the socket API, made from the table of routes and the table of fields."""

from __future__ import annotations

from typing import Any

from gpusched import __version__
from gpusched.api.render import JOB_FIELDS
from gpusched.api.routes import ROUTES, Route
from gpusched.api.schema import SPEC_FIELDS, UPDATE_FIELDS, json_schema

_ERROR = {"$ref": "#/components/responses/Error"}


def build() -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
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
                "Spec": _object({name: json_schema(field) for name, field in SPEC_FIELDS.items()}),
                "Changes": _object({name: json_schema(field) for name, field in UPDATE_FIELDS.items()}),
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


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    problem = {**_object({"message": text, "hint": text}), "required": ["message", "hint"]}
    error = {
        **_object({"message": text, "hint": text, "code": text, "mistakes": {"type": "array", "items": problem}}),
        "required": ["message", "hint", "code"],
    }
    return {
        **_object({"schema_version": {"const": 1}, "error": error}),
        "required": ["schema_version", "error"],
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}_{route.handler.__name__}",
        "responses": {
            "200": {
                "description": f"carries {route.answer}",
                "content": {
                    route.content: {"schema": {"type": "object" if route.content == "application/json" else "string"}}
                },
            },
            "default": _ERROR,
        },
    }
    parameters = [
        {"name": name, "in": "query", "required": False, "description": doc, "schema": {"type": "string"}}
        for name, doc in route.query.items()
    ]
    if "{id}" in route.path:
        parameters.insert(0, {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": _object(route.body)}}}
    return operation
