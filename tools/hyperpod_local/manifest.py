# SPDX-License-Identifier: Apache-2.0
"""An InferenceEndpointConfig, checked against its schema, and the facts that the stand-in needs of
it.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from lmi_config.facts import strict_yaml
from lmi_config.options import arguments, settings
from lmi_config.options.settings import SettingsError
from tools.hyperpod_local import schema

KIND = "InferenceEndpointConfig"
API = "inference.sagemaker.aws.amazon.com/v1"
NODE_IP = "127.0.0.1"
COPY = "model-weights-copy"
"""The operator's volume for `prefetchEnabled`."""
SPLITTING = ("prefixaware", "kvaware")
"""Strategies that let Slipway's router divide prefill and decode."""
_USED = (
    *("invocationEndpoint", "intelligentRoutingSpec", "kubernetes", "kvCacheSpec", "loadBalancer"),
    *("maxDeployTimeInSeconds", "modelSourceConfig", "pdSpec", "replicas", "worker"),
)
"""Fields of `spec` that count here. Some of them count only with these inner fields:"""
_USED_WITHIN = {
    "intelligentRoutingSpec": ("enabled", "routingStrategy"),
    "kubernetes": ("volumes",),
    "loadBalancer": ("healthCheckPath",),
    "pdSpec": ("prefillSpec", "decodingSpec", "routingThreshold"),
    "worker": ("args", "environmentVariables", "image", "modelInvocationPort", "modelVolumeMount"),
}
CONNECTOR = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
_STRICT = schema.strict(schema.SCHEMA)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
Document = dict[str, Any]


class ManifestError(ValueError):
    """A manifest that the operator would not take. It has a line for each fault."""

    def __init__(self, faults: Iterable[str]) -> None:
        super().__init__("\n".join(faults))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """Pods with equal arguments. name: as in OPTION_SERVER_ROLE. args: replace those of the
    worker.
    """

    name: str
    replicas: int
    args: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The endpoint that a manifest asks for.

    folder: the node's folder with the model. mount: the model's path in the container. port: the
    container's. health, invocation: paths. strategy: of intelligent routing, or None. l1: whether
    KV caches are kept in CPU memory. l2: "redis", "tieredstorage" or None. cache_file: a
    configuration of LMCache's; it replaces all other cache settings. seconds: time limit of a
    deployment. apart: the prefill and the decode pods of `pdSpec`, or None. threshold: prompts of
    at least this many tokens are computed by the prefill pods. notes: for an operator, about fields
    that have another effect here, or none.
    """

    name: str
    namespace: str
    args: Sequence[str]
    environ: Mapping[str, str]
    mount: str
    hub_id: str | None
    folder: Path | None
    port: int
    health: str
    invocation: str
    replicas: int
    strategy: str | None
    l1: bool
    l2: str | None
    cache_file: str | None
    seconds: int
    apart: tuple[Role, Role] | None
    threshold: int
    notes: Sequence[str]

    @property
    def roles(self) -> tuple[Role, ...]:
        """All its pods."""
        return self.apart or (Role(name="both", replicas=self.replicas),)


def check(document: Any) -> None:
    """Raise ManifestError for fields that a cluster would refuse or drop."""
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
    for error in jsonschema.Draft202012Validator(_STRICT).iter_errors(document):
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
    """The endpoint that a checked manifest asks for. Raises ManifestError for values that have no
    meaning here.
    """
    spec = schema.with_defaults(document, schema.SCHEMA)["spec"]
    worker, source = spec["worker"], spec["modelSourceConfig"]
    kv = schema.with_defaults(
        spec.get("kvCacheSpec", {}),
        schema.SCHEMA["properties"]["spec"]["properties"]["kvCacheSpec"],
    )
    if faults := [*_faults(spec, kv), *_volume_faults(spec)]:
        raise ManifestError(faults)
    apart = _apart(spec)
    return Endpoint(
        name=document["metadata"]["name"],
        namespace=document["metadata"].get("namespace", "default"),
        args=tuple(worker.get("args", ())),
        environ=_environment(worker.get("environmentVariables", ())),
        mount=worker["modelVolumeMount"].get("mountPath", "/opt/ml/model"),
        hub_id=source.get("huggingFaceModel", {}).get("modelId"),
        folder=_node_folder(spec),
        port=worker["modelInvocationPort"]["containerPort"],
        health=spec.get("loadBalancer", {}).get("healthCheckPath", "/ping"),
        invocation="/" + spec["invocationEndpoint"].lstrip("/"),
        replicas=spec["replicas"],
        strategy=_strategy(spec),
        l1=kv["enableL1Cache"],
        l2=_l2(kv) if kv["enableL2Cache"] else None,
        cache_file=kv.get("cacheConfigFile"),
        seconds=spec["maxDeployTimeInSeconds"],
        apart=apart,
        threshold=spec["pdSpec"]["routingThreshold"] if apart else 0,
        notes=tuple(_notes(document["spec"])),
    )


def _l2(kv: Document) -> str:
    return str(kv.get("l2CacheSpec", {}).get("l2CacheBackend", "")).lower()


def _faults(spec: Document, kv: Document) -> Iterator[str]:
    """Faults that would make this machine serve something else than a cluster would."""
    if spec["worker"].get("command"):
        yield "spec.worker.command: the image's own entry point runs here; leave it out"
    if kv["enableL2Cache"] and _l2(kv) not in ("redis", "tieredstorage"):
        yield "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend: should be redis or tieredstorage"
    if "dynamoSpec" in spec:
        yield (
            "spec.dynamoSpec: NVIDIA Dynamo would serve the endpoint in Slipway's place; leave it "
            "out, and for prefill and decode apart use pdSpec"
        )
    if "pdSpec" in spec and kv.get("cacheConfigFile"):
        yield (
            "spec.kvCacheSpec.cacheConfigFile: with pdSpec, LMCache is configured for the store "
            "through which KV is handed over; leave it out"
        )


def _volume_faults(spec: Document) -> Iterator[str]:
    """Faults of a user's volumes that the operator would refuse."""
    source = spec["modelSourceConfig"]
    mount = spec["worker"]["modelVolumeMount"]["name"]
    names = [it["name"] for it in spec.get("kubernetes", {}).get("volumes", ())]
    if source["modelSourceType"] == "kubernetesVolume" and mount not in names:
        yield (
            f"spec.kubernetes.volumes: has none with the name {mount!r}, which "
            "spec.worker.modelVolumeMount mounts as the model"
        )
    for name in names if source.get("prefetchEnabled") else ():
        if name in (mount, COPY):
            yield (
                f"spec.kubernetes.volumes: {name!r} is a volume that the operator makes for "
                "prefetchEnabled; give yours another name"
            )


def _node_folder(spec: Document) -> Path | None:
    """The folder of a node that is mounted as the model, as with its NVMe disks."""
    if spec["modelSourceConfig"]["modelSourceType"] != "kubernetesVolume":
        return None
    mount = spec["worker"]["modelVolumeMount"]["name"]
    (volume,) = (it for it in spec["kubernetes"]["volumes"] if it["name"] == mount)
    path = volume.get("hostPath", {}).get("path")
    return Path(path) if path else None


def _apart(spec: Document) -> tuple[Role, Role] | None:
    """The roles of `pdSpec`, which it splits by being there."""
    if "pdSpec" not in spec:
        return None

    def role(name: str, field: str) -> Role:
        asked = spec["pdSpec"][field]
        return Role(name=name, replicas=asked["replicas"], args=tuple(asked.get("args", ())))

    return role("prefill", "prefillSpec"), role("decode", "decodingSpec")


def _strategy(spec: Document) -> str | None:
    """The router's strategy; None without intelligent routing."""
    routing = spec.get("intelligentRoutingSpec", {})
    asked = routing.get("routingStrategy", "prefixaware") if routing.get("enabled") else None
    if "pdSpec" in spec and asked not in SPLITTING:
        return "prefixaware"
    return str(asked) if asked else None


def _notes(spec: Document) -> Iterator[str]:
    """Notes about fields of a manifest that have another effect here than on a cluster, or none."""
    mute = [f"spec.{it}" for it in spec if it not in _USED]
    for name, used in _USED_WITHIN.items():
        mute += [f"spec.{name}.{it}" for it in spec.get(name, {}) if it not in used]
    parts = spec.get("pdSpec", {})
    for name in ("prefillSpec", "decodingSpec"):
        inner = parts.get(name, {})
        mute += [f"spec.pdSpec.{name}.{it}" for it in inner if it not in ("args", "replicas")]
    if "pdSpec" in spec:
        mute += [f"spec.{it}" for it in ("replicas", "InitialReplicaCount") if it in spec]
    if mute:
        yield f"checked, and without effect here: {', '.join(dict.fromkeys(mute))}"
    routing = spec.get("intelligentRoutingSpec", {})
    asked = routing.get("routingStrategy", "prefixaware")
    if "pdSpec" in spec and asked not in SPLITTING:
        yield (
            f"spec.intelligentRoutingSpec.routingStrategy: {asked} chooses among the prefill pods; "
            "Slipway's router chooses the one that is free first, and routes by prefixaware"
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
    """Text with `$(NAME)` replaced by the variables that were set before."""
    return re.sub(r"\$\((\w+)\)", lambda it: environ.get(it[1], it[0]), text)


def container(
    endpoint: Endpoint,
    role: Role,
    model: str,
    url: str | None,
    extra: Mapping[str, object],
    l1_gib: float,
) -> tuple[list[str], dict[str, str]]:
    """A container's arguments and variables, with the operator's additions for `kvCacheSpec`, and
    Slipway's own for `pdSpec`.

    model: the mounted folder's path here. url: of L2, or of the store that hands over KV. extra:
    LMCache's extra_config for it. The operator is not public: its additions are taken from AWS's
    documents and its users' logs.
    """
    args = [_expanded(word, endpoint.environ) for word in (*endpoint.args, *role.args)]
    added: dict[str, str] = {"NODE_IP": NODE_IP}
    if endpoint.l1 or url or endpoint.cache_file:
        args += ["--kv-transfer-config", CONNECTOR]
    if endpoint.cache_file:
        added["LMCACHE_CONFIG_FILE"] = endpoint.cache_file
    elif endpoint.l1 or url:
        added["LMCACHE_LOCAL_CPU"] = str(endpoint.l1).lower()
        added["LMCACHE_MAX_LOCAL_CPU_SIZE"] = f"{l1_gib:g}"
        if url:
            added |= {"LMCACHE_REMOTE_URL": url, "LMCACHE_REMOTE_SERDE": "naive"}
            added |= {"LMCACHE_EXTRA_CONFIG": json.dumps(extra)} if extra else {}
    if endpoint.apart:
        added["OPTION_SERVER_ROLE"] = role.name
    environ = {**endpoint.environ, **{name: _expanded(it, added) for name, it in added.items()}}

    def here(text: str) -> str:
        inside = text == endpoint.mount or text.startswith(f"{endpoint.mount}/")
        return model + text.removeprefix(endpoint.mount) if inside else text

    return [here(it) for it in args], {name: here(it) for name, it in environ.items()}


def listens(args: Sequence[str], environ: Mapping[str, str]) -> int:
    """The port that Slipway's container would listen on. Raises ManifestError."""
    verb, words, environ = arguments.called(args, environ) or ("serve", [*args[1:]], environ)
    try:
        return settings.read(environ, arguments.read(verb, words)).port
    except SettingsError as error:
        raise ManifestError([f"spec.worker: {error}"]) from None
