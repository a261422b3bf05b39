# SPDX-License-Identifier: Apache-2.0
"""An InferenceEndpointConfig, held against its published schema, and what follows from it here."""

import copy
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from lmi_config.facts import strict_yaml
from lmi_config.options import arguments, settings
from lmi_config.options.settings import SettingsError

KIND = "InferenceEndpointConfig"
API = "inference.sagemaker.aws.amazon.com/v1"
SCHEMA = json.loads(Path(__file__).with_name("inferenceendpointconfig.json").read_text())
NODE_IP = "127.0.0.1"
CONNECTOR = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
Document = dict[str, Any]


class ManifestError(ValueError):
    """A manifest that the operator would not take. It has a line for each fault."""

    def __init__(self, faults: Iterable[str]) -> None:
        super().__init__("\n".join(faults))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What is asked for.

    mount: where the container sees its model. port: the container's. health, invocation: paths.
    strategy: of intelligent routing, or None. l1: whether KV caches are kept in CPU memory. l2:
    "redis", "tieredstorage" or None. cache_file: a configuration of LMCache's, which then is all
    that counts. seconds: that a deployment may take.
    """

    name: str
    namespace: str
    args: Sequence[str]
    environ: Mapping[str, str]
    mount: str
    hub_id: str | None
    port: int
    health: str
    invocation: str
    replicas: int
    strategy: str | None
    l1: bool
    l2: str | None
    cache_file: str | None
    seconds: int


def strict(schema: Any) -> Any:
    """A schema that refuses fields which Kubernetes drops, as kubectl does."""
    if isinstance(schema, list):
        return [strict(it) for it in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def _with_defaults(value: Any, schema: Document) -> Any:
    """A value with the schema's defaults, in objects that are there."""
    if isinstance(value, list):
        return [_with_defaults(it, schema.get("items", {})) for it in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    defaults = {name: copy.deepcopy(it["default"]) for name, it in known.items() if "default" in it}
    return {
        name: _with_defaults(it, known.get(name, {})) for name, it in {**defaults, **value}.items()
    }


def check(document: Any) -> None:
    """Raise ManifestError for what a cluster would not take, or would drop."""
    if not isinstance(document, dict):
        raise ManifestError(["the file should have one object of Kubernetes"])
    faults = [
        f"{key}: is {document.get(key)!r}, and should be {value}"
        for key, value in (("apiVersion", API), ("kind", KIND))
        if document.get(key) != value
    ]
    name = (document.get("metadata") or {}).get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        faults.append(f"metadata.name: is {name!r}, and should be lower case letters and digits")
    for error in jsonschema.Draft202012Validator(strict(SCHEMA)).iter_errors(document):
        path = ".".join(str(it) for it in error.absolute_path)
        faults.append(f"{path or 'the manifest'}: {error.message}")
    if faults:
        raise ManifestError(faults)


def read(file: Path) -> Endpoint:
    """Read a manifest. Raises ManifestError, and OSError."""
    try:
        document = strict_yaml.read_file(file)
    except strict_yaml.NotYAML as error:
        raise ManifestError([f"{file}: {error}"]) from None
    check(document)
    return endpoint(document)


def endpoint(document: Document) -> Endpoint:
    """What a checked manifest asks for. Raises ManifestError for what has no meaning here."""
    spec = _with_defaults(document, SCHEMA)["spec"]
    worker, source = spec["worker"], spec["modelSourceConfig"]
    kv = _with_defaults(
        spec.get("kvCacheSpec", {}), SCHEMA["properties"]["spec"]["properties"]["kvCacheSpec"]
    )
    routing = spec.get("intelligentRoutingSpec", {})
    backend = kv.get("l2CacheSpec", {}).get("l2CacheBackend", "").lower()
    faults = []
    if worker.get("command"):
        faults.append("spec.worker.command: the image's own entry point runs here; leave it out")
    if kv["enableL2Cache"] and backend not in ("redis", "tieredstorage"):
        faults.append(
            "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend: should be redis or tieredstorage"
        )
    if spec.get("pdSpec"):
        faults.append("spec.pdSpec: prefill and decoding are not split; leave it out")
    if faults:
        raise ManifestError(faults)
    return Endpoint(
        name=document["metadata"]["name"],
        namespace=document["metadata"].get("namespace", "default"),
        args=tuple(worker.get("args", ())),
        environ=_environment(worker.get("environmentVariables", ())),
        mount=worker["modelVolumeMount"].get("mountPath", "/opt/ml/model"),
        hub_id=source.get("huggingFaceModel", {}).get("modelId"),
        port=worker["modelInvocationPort"]["containerPort"],
        health=spec.get("loadBalancer", {}).get("healthCheckPath", "/ping"),
        invocation="/" + spec["invocationEndpoint"].lstrip("/"),
        replicas=spec["replicas"],
        strategy=routing.get("routingStrategy", "prefixaware") if routing.get("enabled") else None,
        l1=kv["enableL1Cache"],
        l2=backend if kv["enableL2Cache"] else None,
        cache_file=kv.get("cacheConfigFile"),
        seconds=spec["maxDeployTimeInSeconds"],
    )


def _environment(variables: Iterable[Document]) -> dict[str, str]:
    """Variables as Kubernetes makes them; those of secrets and the like are not here."""
    found: dict[str, str] = {}
    for variable in variables:
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if field in ("status.hostIP", "status.podIP"):
            found[variable["name"]] = NODE_IP
        elif "valueFrom" not in variable:
            found[variable["name"]] = _expanded(variable.get("value", ""), found)
    return found


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """Text with `$(NAME)` replaced by what was set before."""
    return re.sub(r"\$\((\w+)\)", lambda it: environ.get(it[1], it[0]), text)


def container(
    endpoint: Endpoint, model: str, url: str | None, extra: Mapping[str, object], l1_gib: float
) -> tuple[list[str], dict[str, str]]:
    """A container's arguments and variables, with what the operator adds for `kvCacheSpec`.

    model: what the mounted folder is here. url: of L2. extra: LMCache's extra_config for it. The
    operator is not public: what it adds is what AWS's documents and its users' logs show.
    """
    args = [_expanded(word, endpoint.environ) for word in endpoint.args]
    added: dict[str, str] = {"NODE_IP": NODE_IP}
    if endpoint.l1 or endpoint.l2 or endpoint.cache_file:
        args += ["--kv-transfer-config", CONNECTOR]
    if endpoint.cache_file:
        added["LMCACHE_CONFIG_FILE"] = endpoint.cache_file
    elif endpoint.l1 or endpoint.l2:
        added["LMCACHE_LOCAL_CPU"] = str(endpoint.l1).lower()
        added["LMCACHE_MAX_LOCAL_CPU_SIZE"] = f"{l1_gib:g}"
        if url:
            added |= {"LMCACHE_REMOTE_URL": url, "LMCACHE_REMOTE_SERDE": "naive"}
            added |= {"LMCACHE_EXTRA_CONFIG": json.dumps(extra)} if extra else {}
    environ = {**endpoint.environ, **{name: _expanded(it, added) for name, it in added.items()}}

    def here(text: str) -> str:
        inside = text == endpoint.mount or text.startswith(f"{endpoint.mount}/")
        return model + text.removeprefix(endpoint.mount) if inside else text

    return [here(it) for it in args], {name: here(it) for name, it in environ.items()}


def listens(args: Sequence[str], environ: Mapping[str, str]) -> int:
    """The port on which Slipway's container would listen. Raises ManifestError."""
    verb, words, environ = arguments.called(args, environ) or ("serve", [*args[1:]], environ)
    try:
        return settings.read(environ, arguments.read(verb, words)).port
    except SettingsError as error:
        raise ManifestError([f"spec.worker: {error}"]) from None
