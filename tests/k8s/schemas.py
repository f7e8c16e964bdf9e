"""Validates documents by the schemas of Kubernetes and KubeRay, others by the parts used here."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
from pydantic import BaseModel

from tandem.tests.k8s.manifests import Document, Manifests

KUBERNETES: Final = "1.32"
CRD: Final = Path(__file__).parent / "crds" / "rayservice.v1.json"


def _object(required: str = "", **properties: Any) -> Document:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Document) -> Document:
    return {"type": "array", "items": items, "minItems": 1}


TEXT: Final[Document] = {"type": "string", "minLength": 1}
TEXTS: Final[Document] = {"type": "object", "additionalProperties": TEXT}
PORT: Final[Document] = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION: Final[Document] = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}


def _route(**rule: Document) -> Document:
    """Returns the spec of a route whose rules have these keys beside their backends."""
    backends = _list(_object("name port", name=TEXT, port=PORT))
    return _object(
        "parentRefs rules",
        parentRefs=_list(_object("name", name=TEXT)),
        hostnames=_list(TEXT),
        rules=_list(_object("backendRefs", backendRefs=backends, **rule)),
    )


OTHER_KINDS: Final[dict[str, Document]] = {
    "monitoring.coreos.com/v1/PodMonitor": _object(
        "selector podMetricsEndpoints",
        selector=_object("matchLabels", matchLabels=TEXTS),
        podMetricsEndpoints=_list(_object("port path", port=TEXT, path=TEXT, interval=DURATION)),
    ),
    "monitoring.coreos.com/v1/PrometheusRule": _object(
        "groups",
        groups=_list(
            _object(
                "name rules",
                name=TEXT,
                interval=DURATION,
                rules=_list(
                    {
                        "oneOf": [
                            _object("record expr", record=TEXT, expr=TEXT, labels=TEXTS),
                            _object(
                                "alert expr annotations",
                                **{
                                    "alert": TEXT,
                                    "expr": TEXT,
                                    "for": DURATION,
                                    "labels": TEXTS,
                                    "annotations": TEXTS,
                                },
                            ),
                        ]
                    }
                ),
            )
        ),
    ),
    "gateway.networking.k8s.io/v1/HTTPRoute": _route(
        matches=_list(
            _object(path=_object("type value", type={"enum": ["PathPrefix"]}, value=TEXT))
        ),
        timeouts=_object(request=DURATION),
    ),
    "gateway.networking.k8s.io/v1/GRPCRoute": _route(
        matches=_list(_object(method=_object("service", service=TEXT)))
    ),
    "cert-manager.io/v1/Certificate": _object(
        "secretName issuerRef",
        secretName=TEXT,
        dnsNames=_list(TEXT),
        issuerRef=_object("name kind", name=TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}),
    ),
}
"""Of the parts of other projects' kinds that we use. Whoever uses more of them adds it here."""


def complaints(document: Document) -> list[str]:
    """Returns the errors of a document; an unknown key is an error."""
    kind = f"{document['apiVersion']}/{document['kind']}"
    if kind == "ray.io/v1/RayService":
        return _errors(_ray_service(), document) or _pod_complaints(document)
    if kind in OTHER_KINDS:
        metadata = _object("name", name=TEXT, labels=TEXTS, annotations=TEXTS)
        whole = _object(
            "metadata spec", apiVersion=TEXT, kind=TEXT, metadata=metadata, spec=OTHER_KINDS[kind]
        )
        return _errors(jsonschema.Draft202012Validator(whole), document)
    return _core_complaints(document)


def _core_complaints(document: Document) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{document['kind']}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [error.message]
    return []


def _pod_complaints(service: Document) -> list[str]:
    found = []
    for group in Manifests([service]).groups.values():
        metadata = group.spec["template"].get("metadata", {})
        found += _core_complaints(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group.pod}
        )
    return found


@cache
def _ray_service() -> Any:
    return jsonschema.Draft202012Validator(_closed(json.loads(CRD.read_text())))


def _closed(schema: Any) -> Any:
    """Returns an OpenAPI schema as a JSON schema that refuses unknown keys."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    properties = closed.get("properties")
    if (
        isinstance(properties, dict)
        and closed.get("type") == "object"
        and "additionalProperties" not in closed
    ):
        closed["additionalProperties"] = False
    return closed


def _errors(validator: Any, document: Document) -> list[str]:
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(document)
    ]


def unknown_keys(given: Any, parsed: Any, path: str = "") -> list[str]:
    """Returns the keys of `given` that its parsed model does not know: Serve accepts any key."""
    if isinstance(parsed, BaseModel) and isinstance(given, dict):
        fields = type(parsed).model_fields
        found = [f"{path}{key}" for key in given if key not in fields]
        for key in given.keys() & fields.keys():
            found += unknown_keys(given[key], getattr(parsed, key), f"{path}{key}.")
        return found
    if isinstance(parsed, list) and isinstance(given, list):
        pairs = zip(given, parsed, strict=True)
        return [each for one, other in pairs for each in unknown_keys(one, other, path)]
    return []
