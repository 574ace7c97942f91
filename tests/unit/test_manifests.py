"""The manifests of examples/kubernetes fit their schemas, each other, and delayq."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from delayq import Worker
from delayq.worker import HealthServer
from delayq.worker._scale import window_of

ROOT = Path(__file__).parents[2]
MANIFESTS: dict[str, Any] = {
    manifest["kind"]: manifest
    for path in sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text("utf-8"))
}
KEDA = yaml.safe_load((ROOT / "tests" / "data" / "keda_scaledobject.yaml").read_text("utf-8"))
FIGURES = {"due", "due_within", "running", "waiting", "late_seconds"}


def validate(manifest: Any) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_every_manifest_fits_its_schema() -> None:
    assert {*MANIFESTS} == {"Deployment", "Service", "PodDisruptionBudget", "ScaledObject"}
    for kind, manifest in MANIFESTS.items():
        if kind != "ScaledObject":
            validate(manifest)
    scaled = MANIFESTS["ScaledObject"]
    Draft202012Validator(KEDA).validate(scaled)
    # KEDA makes one of these of it.
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", **scaled["spec"]["scaleTargetRef"]}
    spec = {"scaleTargetRef": target, "maxReplicas": scaled["spec"]["maxReplicaCount"], **behavior}
    name = {"name": "a"}
    kind = "HorizontalPodAutoscaler"
    validate({"apiVersion": "autoscaling/v2", "kind": kind, "metadata": name, "spec": spec})


def test_the_worker_has_time_to_stop_and_its_probes_ask_where_it_answers() -> None:
    pod = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # And some seconds in which cancelled handlers end and messages go back.
    assert pod["terminationGracePeriodSeconds"] >= Worker().shutdown_timeout + 10
    command = container["command"]
    assert command[:2] == ["delayq", "worker"]
    server = HealthServer(command[command.index("--health") + 1])
    assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [
        ("health", server.port)
    ]
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "health"}


def test_the_autoscaler_asks_the_workers_that_it_scales() -> None:
    deployment, service = MANIFESTS["Deployment"], MANIFESTS["Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert MANIFESTS[kind]["spec"]["selector"]["matchLabels"] == labels
    scaled = MANIFESTS["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (port,) = service["spec"]["ports"]
    triggers = {trigger["name"]: trigger["metadata"] for trigger in scaled["triggers"]}
    for trigger in triggers.values():
        url = urlsplit(trigger["url"])
        assert url.netloc.split(".")[0] == service["metadata"]["name"]
        assert (url.port, url.path) == (port["port"], "/scale/mails")
        assert window_of(url.query) == 60
        assert trigger["valueLocation"] in FIGURES
    formula = scaled["advanced"]["scalingModifiers"]["formula"]
    assert {*re.findall(r"\w+", formula)} == {*triggers}
