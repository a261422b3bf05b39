# SPDX-License-Identifier: Apache-2.0
"""A real Envoy in front of replicas, with an endpoint picker beside it."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support import programs
from tests.support.harness import ports
from tests.support.harness.process import Program
from tests.support.harness.wait import until

TYPES = "type.googleapis.com/envoy."
HTTP = TYPES + "extensions.filters.http."
NETWORK = TYPES + "extensions.filters.network."
BALANCING = TYPES + "extensions.load_balancing_policies."

SUBSET = """
function envoy_on_request(handle)
  local wanted = handle:headers():get("x-test-subset")
  if wanted then
    local endpoints = {}
    for one in string.gmatch(wanted, "[^,]+") do table.insert(endpoints, one) end
    handle:streamInfo():dynamicMetadata():set(
      "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", endpoints)
  end
end
"""
"""Passes a subset of the endpoints to the picker, as a gateway does. Here the client names the
subset.
"""


def configuration(
    listen: int,
    admin: int,
    picker: int,
    replicas: Sequence[int],
    *,
    fail_open: bool,
    message_timeout: str,
    picker_tls: Path | None,
    replicas_ca: Path | None,
    **processing: str,
) -> dict[str, Any]:
    """Envoy's configuration as gateways write it for an InferencePool. All numbers are ports.

    picker_tls: a file with the authority that must have signed the picker's certificate, or Path()
    to skip the verification; None for no TLS. replicas_ca: the same for the replicas.
    """

    def tls(authority: Path | None, *protocols: str) -> dict[str, Any]:
        if authority is None:
            return {}
        common: dict[str, Any] = {"alpn_protocols": protocols}
        if authority.name:
            common["validation_context"] = {
                "trusted_ca": {"filename": str(authority)},
                "match_typed_subject_alt_names": [
                    {"san_type": "DNS", "matcher": {"exact": "localhost"}}
                ],
            }
        context = {
            "@type": TYPES + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": common,
        }
        return {"transport_socket": {"name": "tls", "typed_config": context}}

    def endpoint(port: int) -> dict[str, Any]:
        address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
        return {"endpoint": {"address": address}}

    def cluster(name: str, *ports: int, **more: Any) -> dict[str, Any]:
        endpoints = [{"lb_endpoints": [endpoint(it) for it in ports]}]
        return {
            "name": name,
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": {"cluster_name": name, "endpoints": endpoints},
            **more,
        }

    def filtered(name: str, kind: str, **config: Any) -> dict[str, Any]:
        return {"name": name, "typed_config": {"@type": HTTP + kind, **config}}

    round_robin = {"@type": BALANCING + "round_robin.v3.RoundRobin"}
    fallback = {"name": "round_robin", "typed_config": round_robin}
    override_host = {
        "@type": BALANCING + "override_host.v3.OverrideHost",
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": TYPES + "extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    route = {
        "cluster": "replicas",
        "timeout": "0s",
        "retry_policy": {
            "retry_on": "connect-failure,reset,retriable-status-codes",
            "retriable_status_codes": [429, 502, 503],
            "num_retries": 3,
        },
    }
    ext_proc = filtered(
        "ext_proc",
        "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        failure_mode_allow=fail_open,
        message_timeout=message_timeout,
        processing_mode={
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
            **processing,
        },
        response_attributes=["upstream.address"],
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )
    manager = {
        "@type": NETWORK + "http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        "http_filters": [
            filtered("subset", "lua.v3.Lua", default_source_code={"inline_string": SUBSET}),
            ext_proc,
            filtered("router", "router.v3.Router"),
        ],
    }
    listener = {
        "name": "http",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": listen}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    chosen = {"name": "override_host", "typed_config": override_host}
    policy = {"policies": [{"typed_extension_config": chosen}]}
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {
            "listeners": [listener],
            "clusters": [
                cluster("replicas", *replicas, load_balancing_policy=policy, **tls(replicas_ca)),
                cluster(
                    "picker",
                    picker,
                    typed_extension_protocol_options=http2,
                    **tls(picker_tls, "h2"),
                ),
            ],
        },
    }


@contextlib.contextmanager
def gateway(
    folder: Path,
    picker: int,
    replicas: Sequence[int],
    *,
    fail_open: bool = False,
    message_timeout: str = "5s",
    picker_tls: Path | None = None,
    replicas_ca: Path | None = None,
    **processing: str,
) -> Iterator[Program]:
    """A listening Envoy. picker, replicas: ports. The other parameters are those of
    configuration().
    """
    listen, admin = ports.free(), ports.free()
    file = folder / "envoy.json"
    found = configuration(
        listen,
        admin,
        picker,
        replicas,
        fail_open=fail_open,
        message_timeout=message_timeout,
        picker_tls=picker_tls,
        replicas_ca=replicas_ca,
        **processing,
    )
    file.write_text(json.dumps(found))
    command = [
        str(programs.envoy()),
        "-c",
        str(file),
        "--concurrency",
        "1",
        "--disable-hot-restart",
    ]
    program = Program(*command, log=folder / "envoy.log", port=listen)
    with program:
        until(lambda: program.listens() or program.process.poll() is not None)
        assert program.process.poll() is None, program.logged()[-3000:]
        yield program
